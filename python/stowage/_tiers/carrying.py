# SPDX-License-Identifier: Apache-2.0
"""What a plan asks of `offload` and `load`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from stowage._ops.errors import InvalidArgument
from stowage._tiers.engine import EngineOptions
from stowage.planning import Plan, Unit

Planned = Plan | str | os.PathLike[str]


@dataclass(frozen=True)
class Carried:
    """Arguments of `offload`, and what stays in memory beside a ring for the rest."""

    ram: int | None  # bytes of the engine; None: no engine
    device: str = "cpu"
    accelerator: int | None = None
    device_map: dict[str, str] = field(default_factory=dict)
    keep: tuple[str, ...] = ()
    ring: int = 0

    def offload_arguments(
        self, folder: str | os.PathLike[str] | None
    ) -> tuple[str | os.PathLike[str] | None, int | None, str, int | None, dict[str, str] | None]:
        """folder (none where nothing rests on a disk), ram, device, accelerator and device_map.
        Raises InvalidArgument where weights go to a disk and no folder is given."""
        if self.ram is not None and folder is None:
            raise InvalidArgument(
                "stowage.offload: folder must come with a plan that leaves weights on a disk"
            )
        where = None if self.ram is None else folder
        return where, self.ram, self.device, self.accelerator, self.device_map or None

    def options(self, given: EngineOptions) -> EngineOptions:
        if self.ram is None:
            return given
        return replace(given, ram=self.ram, keep=self.keep, ring=self.ring)


def read_plan(given: Planned) -> Plan:
    return given if isinstance(given, Plan) else Plan.load(given)


def check_alone(where: str, plan: object, others: Mapping[str, Any]) -> None:
    """Raises InvalidArgument where arguments are given that the plan decides."""
    given = {name: value for name, value in others.items() if value is not None}
    if plan is not None and given:
        told = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise InvalidArgument(f"{where}: plan must come without what it decides, got {told} too")


def carried_by_engine(where: str, plan: Plan) -> EngineOptions:
    """How `load` keeps to a plan without an accelerator. Raises InvalidArgument for another one, or
    for another machine's."""
    plan.check_machine()
    if plan.facts["limits"]["accelerators"]:
        raise InvalidArgument(
            f"{where}: a plan with accelerators must be given to stowage.offload, which takes the "
            "model that stowage.load(..., mmap=True) gives, and the same folder"
        )
    keep, ring = _kept(plan), plan.ring.get("ram", 0)
    return EngineOptions(_room(keep, ring), keep=_names(keep), ring=ring)


def _room(kept: list[Unit], ring: int) -> int:
    """Bytes of the engine."""
    return sum(unit.bytes for unit in kept) + ring


def _kept(plan: Plan) -> list[Unit]:
    return [unit for unit in plan.units if unit.tier == "ram" and not unit.stays]


def carried(where: str, plan: Plan, model: nn.Module) -> Carried:
    """How `offload` keeps to a plan for `model`. Raises InvalidArgument for a plan for another
    model or machine, or one that cannot be carried out."""
    plan.check(model)
    home = _home(where, plan)
    if home is None:
        how = carried_by_engine(where, plan)
        return Carried(how.ram, keep=how.keep, ring=how.ring)
    plan.check_machine()
    keep, ring = _kept(plan), plan.ring.get("ram", 0)
    streamed = any(unit.tier == "disk" and not unit.stays for unit in plan.units)
    places = _places(plan, model, home)
    # What the map names is beside the engine's memory.
    kept = [u for u in keep if not any(_inside(u.name, at) for at in places)]
    size = _room(kept, ring)
    tile = plan.facts["tiles"].get(home, 0) + plan.facts["activations"]
    limit = plan.facts["limits"]["accelerators"][home] - tile
    return Carried(size if streamed else None, home, limit, places, _names(kept), ring)


def _names(units: list[Unit]) -> tuple[str, ...]:
    """The most used first: they stay longest where there is less room than planned."""
    return tuple(unit.name for unit in sorted(units, key=lambda unit: -unit.uses))


def _home(where: str, plan: Plan) -> str | None:
    """The accelerator that weights are brought to."""
    limits: dict[str, int] = plan.facts["limits"]["accelerators"]
    brought = {u.work for u in plan.units if u.work in limits and u.tier != u.work}
    if len(brought) > 1:
        raise InvalidArgument(
            f"{where}: a plan must bring weights to one accelerator, got one that brings them to "
            f"{', '.join(sorted(brought))}; more room, or fewer accelerators"
        )
    return next(iter(brought or limits), None)


def _places(plan: Plan, model: nn.Module, home: str) -> dict[str, str]:
    """A device map: modules whose weights rest where they are multiplied. What it does not name is
    brought to `home`."""
    modules = dict(model.named_modules(remove_duplicate=False))
    tiers: dict[str, set[str]] = {}
    for unit in plan.units:
        if not unit.stays:
            place = unit.work if unit.tier == unit.work else ""
            if unit.work == "cpu" and unit.tier == "ram" and not unit.rows:
                place = "ram"
            tiers.setdefault(unit.name.rpartition(".")[0], set()).add(place)
    return {
        at: next(iter(places))
        for at, places in tiers.items()
        if at in modules and len(places) == 1 and places != {""} and not _has_children(modules[at])
    }


def _has_children(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _inside(name: str, at: str) -> bool:
    return name == at or name.startswith(f"{at}.")

# SPDX-License-Identifier: Apache-2.0
"""How `offload` and `load` carry a plan out, and its passes beside what it said: told once, when
passes repeat."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from stowage._model.weights import Inventory
from stowage._ops.eager import eagerly
from stowage._ops.errors import InvalidArgument
from stowage._tiers.counts import EngineReport
from stowage._tiers.disk.engine import Engine, EngineOptions, engine_of, signature_of
from stowage._tiers.plans.plan import Plan, Unit, is_slice

Planned = Plan | str | os.PathLike[str]
_ATTRIBUTE = "_stowage_plan"
_logger = logging.getLogger("stowage")
_OFF, _LEAST = 0.15, 0.01  # of the planned time, and seconds: more is worth a warning


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
    return EngineOptions(_room(plan, keep, ring), keep=_names(keep), ring=ring)


def _room(plan: Plan, kept: list[Unit], ring: int) -> int:
    """Bytes of the engine."""
    scratch: int = plan.facts.get("scratch", 0)
    return sum(unit.bytes for unit in kept) + ring + scratch


def _kept(plan: Plan) -> list[Unit]:
    return [unit for unit in plan.units if unit.tier == "ram" and not unit.stays]


def carried(where: str, plan: Plan, inventory: Inventory) -> Carried:
    """How `offload` keeps to a plan for a model. Raises InvalidArgument for a plan for another
    model or machine, or one that cannot be carried out."""
    plan.check(inventory.model)
    home = _home(where, plan)
    if home is None:
        how = carried_by_engine(where, plan)
        return Carried(how.ram, keep=how.keep, ring=how.ring)
    plan.check_machine()
    keep, ring = _kept(plan), plan.ring.get("ram", 0)
    streamed = any(unit.tier == "disk" and not unit.stays for unit in plan.units)
    places = _places(plan, inventory.modules, home)
    # Matrices that the ring of the device keeps, as those that are used most, rest below it.
    kept_there = [u for u in plan.units if u.tier == home and is_slice(u.name)]
    below = sum(u.bytes for u in kept_there if not any(_inside(u.name, at) for at in places))
    # What the map names is beside the engine's memory.
    kept = [u for u in keep if not any(_inside(u.name, at) for at in places)]
    size = _room(plan, kept, ring)
    tile = plan.facts["tiles"].get(home, 0) + plan.facts["activations"]
    limit = plan.facts["limits"]["accelerators"][home] - tile
    if plan.predicted.peak["ram"] + below > plan.facts["limits"]["ram"]:
        streamed = True
    return Carried(size if streamed else None, home, limit, places, _names(kept), ring)


def _names(units: list[Unit]) -> tuple[str, ...]:
    """The most used first: they stay longest where there is less room than planned."""
    return tuple(unit.name for unit in sorted(units, key=lambda unit: -unit.uses))


def _home(where: str, plan: Plan) -> str | None:
    """The accelerator that weights are fetched to."""
    limits: dict[str, int] = plan.facts["limits"]["accelerators"]
    fetched = {u.work for u in plan.units if u.work in limits and u.tier != u.work}
    if len(fetched) > 1:
        raise InvalidArgument(
            f"{where}: a plan must fetch weights to one accelerator, got one that fetches them to "
            f"{', '.join(sorted(fetched))}; more room, or fewer accelerators"
        )
    return next(iter(fetched or limits), None)


def _places(plan: Plan, modules: Mapping[str, nn.Module], home: str) -> dict[str, str]:
    """A device map: modules whose weights rest where they are multiplied. What it does not name is
    fetched to `home`."""
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
        if at in modules
        and len(places) == 1
        and places != {""}
        and not _has_weights_in(modules[at])
    }


def _has_weights_in(module: nn.Module) -> bool:
    """Whether modules in it have tensors: activations, as experts have one, have none."""
    return any(next(child.parameters(), None) is not None for child in module.children())


def _inside(name: str, at: str) -> bool:
    return name == at or name.startswith(f"{at}.")


class KeptPlan:
    """The plan that a model keeps to, until it has been compared with a pass."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._seen: set[int] = set()
        self._begun = 0.0
        self._before = EngineReport()
        self._told = False

    def begin(self, engine: Engine | None) -> None:
        if not self._told:
            self._before = EngineReport() if engine is None else engine.report()
            self._begun = time.perf_counter()

    def end(self, engine: Engine | None, signature: int) -> None:
        """A pass of inputs of this kind. The first of each kind learns the order, and is left
        out."""
        if self._told or signature not in self._seen:
            self._seen.add(signature)
            return
        self._told = True
        figures: dict[str, Any] = {"seconds": time.perf_counter() - self._begun}
        if engine is not None:
            once = engine.report().since(self._before)
            figures |= {"stall": once.stall, "bytes": {"disk->ram": once.bytes_read}}
        compared = self.plan.compare(figures)
        off = abs(compared.measured - compared.predicted)
        level = logging.WARNING if off > max(_OFF * compared.predicted, _LEAST) else logging.INFO
        rows = self.plan.facts["rows"]
        _logger.log(level, "stowage: a pass beside its plan, for %d rows: %s", rows, compared)

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptPlan:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a pickled model rests nowhere


class _Begin:
    def __init__(self, kept: KeptPlan | None) -> None:
        self._kept = kept

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._kept is not None and not torch.compiler.is_compiling():
            eagerly(self._kept.begin, engine_of(module))


_Begin.__module__ = "stowage._tiers.timing"  # pickles name it


class _End:
    def __init__(self, kept: KeptPlan | None) -> None:
        self._kept = kept

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: object
    ) -> None:
        if self._kept is not None and not torch.compiler.is_compiling():
            eagerly(self._kept.end, engine_of(module), signature_of(args, kwargs))


_End.__module__ = "stowage._tiers.timing"  # pickles name it


def keep_to(model: nn.Module, plan: Plan | None) -> None:
    """Notes the plan that `model` keeps to from now on, if it keeps to one."""
    if plan is None:
        return
    kept = KeptPlan(plan)
    model.__dict__[_ATTRIBUTE] = kept
    model.__dict__[_ATTRIBUTE + "_hooks"] = [
        model.register_forward_pre_hook(_Begin(kept)),
        model.register_forward_hook(_End(kept), with_kwargs=True),
    ]


def forget_plan(model: nn.Module) -> None:
    model.__dict__.pop(_ATTRIBUTE, None)
    for hook in model.__dict__.pop(_ATTRIBUTE + "_hooks", ()):
        hook.remove()


def kept_plan(model: nn.Module) -> KeptPlan | None:
    found: KeptPlan | None = model.__dict__.get(_ATTRIBUTE)
    return found

# SPDX-License-Identifier: Apache-2.0
"""`plan`: which weight rests where, and what a pass will take, known before anything is loaded. The
core plans; here are the weights of a model as it takes them, and its places under few names."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from stowage._model.choice.policy import Policy
from stowage._model.sizes import byte_count
from stowage._ops import library
from stowage._ops.errors import InvalidArgument, translated
from stowage._ops.texts import read_text, write_text
from stowage._tiers.plans.description import Source, config_of, described
from stowage._tiers.plans.measurement import Measured, figures_of
from stowage._tiers.uses import Uses

Size = int | str
_SLICE = re.compile(r"\[\d+\]$")  # of a name: one matrix of a stack


def is_slice(name: str) -> bool:
    return _SLICE.search(name) is not None


@dataclass(frozen=True)
class Unit:
    """A weight with its scales, or a plain tensor, in a plan: an item of `Plan.units`.

    Example:
        >>> plan = stowage.plan(model, ram="1MiB", links=links)
        >>> plan.units[0].name, plan.units[0].tier
        ('0.weight', 'ram')
    """

    name: str  # of the parameter or buffer
    storage: str  # how it rests: a storage, or a dtype
    bytes: int  # in memory
    tier: str  # "disk", "ram" or an accelerator
    work: str  # "cpu" or an accelerator
    uses: float  # per pass
    rows: bool  # only rows of it are read
    stays: bool  # plain and small, or spread over processes
    seconds: float  # of work, per pass
    why: str  # why it rests there


@dataclass(frozen=True)
class Predicted:
    """What a pass takes by a plan: `Plan.predicted`, whose `peak` is by tier, `bytes` by link.

    Example:
        >>> stowage.plan(model, ram="1MiB", links=links).predicted.peak["ram"] < 1 << 20
        True
    """

    seconds: float  # of a pass
    peak: dict[str, int]
    bytes: dict[str, int]
    hits: float | None = None  # of the uses of experts, the part that finds them in memory


@dataclass(frozen=True)
class Comparison:
    """What a plan predicted beside what a pass took, in seconds: `Plan.compare` gives it.

    `str()` says it in a sentence, and where it is off by more than 15 % what most likely differs.

    Example:
        >>> round(stowage.Comparison(predicted=2.0, measured=2.2, text="").off, 2)
        0.1
    """

    predicted: float  # seconds of a pass
    measured: float  # seconds of a pass
    text: str  # what `str()` gives

    @property
    def off(self) -> float:
        """A part of what was predicted: 0.09 where the pass took 9 % more."""
        return self.measured / self.predicted - 1 if self.predicted else 0.0

    def __str__(self) -> str:
        return self.text


class Plan:
    """Which weight rests where: made by `stowage.plan`, written by `save`, read by `Plan.load`.

    `print(plan)` shows the limits, what is predicted, and each weight with its reason.

    Args:
        text: JSON as docs/planning.md has it.
        where: what an error calls it.

    Raises:
        BadFile: the text is no plan.

    Example:
        >>> stowage.plan(model, ram="1MiB", links=links).save("plan.json")
        >>> stowage.Plan.load("plan.json").units[0].storage
        'f32'
    """

    def __init__(self, text: str, where: str = "plan") -> None:
        """`text`: JSON as docs/planning.md has it. Raises BadFile for what is no plan."""
        self._text = _called(library.plan_read, text, where)
        self.facts: dict[str, Any] = json.loads(self._text)

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """In order of use."""
        names = Unit.__dataclass_fields__
        return tuple(Unit(**{k: u[k] for k in names}) for u in self.facts["units"])

    @cached_property
    def predicted(self) -> Predicted:
        """What a pass takes."""
        facts = self.facts["predicted"]
        hits = facts.get("hits")
        return Predicted(facts["seconds"], facts["peak"], facts["bytes"], hits)

    @property
    def fingerprint(self) -> str:
        """Of the weights that it was made for: names, storages, shapes, bytes."""
        return str(self.facts["model"]["fingerprint"])

    @property
    def ring(self) -> dict[str, int]:
        """Tier to bytes for what moves."""
        return dict(self.facts["ring"])

    def names(self, tier: str) -> list[str]:
        """The weights that rest in a tier, in order of use; small ones that stay are not named.

        Args:
            tier: "disk", "ram" or an accelerator.

        Returns:
            Names of parameters.
        """
        return [unit.name for unit in self.units if unit.tier == tier and not unit.stays]

    def device_map(self) -> dict[str, str]:
        """Which module or weight rests where, in accelerate's words.

        Returns:
            Names to "cpu", "disk" or a device; a module stands for all of its weights where they
            rest in one place, and a stack of experts is on the disk if one of them is.
        """
        places: dict[str, str] = {}
        for unit in self.units:
            name, place = _SLICE.sub("", unit.name), "cpu" if unit.tier == "ram" else unit.tier
            places[name] = "disk" if places.get(name) == "disk" else place
        return collapsed(places)

    def within(self, ram: Size) -> Plan:
        """The plan for the same weights and machine within another limit of RAM.

        Args:
            ram: bytes, or a text such as "2GiB".

        Returns:
            Another plan.

        Raises:
            InvalidArgument: no plan keeps that limit.
        """
        facts, model = self.facts, self.facts["model"]
        request = {
            "path": None,
            "name": model["name"],
            "units": facts["units"],
            "ram": byte_count(ram, "ram"),
            "accelerators": list(facts["limits"]["accelerators"].items()),
            "uses": [],
            "storage": None,
            "rows": facts["rows"],
            "activations": facts["activations"],
            "works_on_cpu": True,
            "order": [unit["name"] for unit in facts["units"]],
        }
        links = json.dumps(facts["machine"]["links"] | {"key": facts["machine"]["key"]})
        return Plan(_called(library.plan_make, json.dumps(request), links))

    def check(self, source: Source) -> None:
        """Checks that a model has the weights that the plan was made for, resting as it says.

        Args:
            source: a model, or the path of one.

        Raises:
            InvalidArgument: names the difference.
        """
        _called(library.plan_check, self._text, json.dumps(described(source)))

    def check_machine(self) -> None:
        """Checks that the plan's rates are of this machine: its CPU, cores, memory and kernel.

        Raises:
            InvalidArgument: names both machines.
        """
        planned, here = str(self.facts["machine"]["key"]), machine_key()
        if planned != here:
            raise InvalidArgument(
                f"plan: must be made for this machine, {here}; got one for {planned}"
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON.

        Args:
            path: the file.

        Raises:
            FileError: it cannot be written.
        """
        write_text(path, self._text)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Reads what `save` wrote.

        Args:
            path: the file.

        Returns:
            The plan.

        Raises:
            BadFile: it holds no plan of this version.
            FileError: it cannot be read.
        """
        return cls(read_text(path), os.fspath(path))

    def html(
        self,
        path: str | os.PathLike[str],
        *,
        seconds: float = 0,
        peak: Mapping[str, int] | None = None,
        bytes: Mapping[str, int] | None = None,
        measured: Measured | Mapping[str, Any] | None = None,
    ) -> None:
        """Writes a page that needs no other: memory over the pass, bytes by tier and storage.

        What was measured is shown beside what was predicted.

        Args:
            path: the file.
            seconds: seconds of a pass.
            peak: tier to bytes.
            bytes: link to bytes.
            measured: all of it, as `stowage.measured` gave it, instead of the three.

        Raises:
            FileError: it cannot be written.
        """
        given = {"seconds": seconds, "peak": dict(peak or {}), "bytes": dict(bytes or {})}
        figures = given if measured is None else figures_of(measured)
        write_text(path, _called(library.plan_html, self._text, json.dumps(figures)))

    def compare(self, measured: Measured | Mapping[str, Any]) -> Comparison:
        """Compares the plan with what a pass took. Changes nothing.

        Args:
            measured: what `stowage.measured` gave, or its figures ("seconds", and what is known of
                "peak", "bytes" and "stall").

        Returns:
            Both, in seconds and in words.

        Raises:
            InvalidArgument: no pass was measured.
        """
        figures = figures_of(measured)
        text = _called(library.plan_compare, self._text, json.dumps(figures))
        return Comparison(self.predicted.seconds, float(figures["seconds"]), text)

    def to_json(self) -> str:
        """The plan as JSON.

        Returns:
            What `save` writes.
        """
        return self._text

    def __str__(self) -> str:
        return _called(library.plan_text, self._text)

    def __repr__(self) -> str:
        model = self.facts["model"]
        return (
            f"Plan({model['name']!r}, {model['weights']} weights, {self.predicted.seconds:.3g} s)"
        )


Plan.__module__ = "stowage.planning"  # pickles name it


def plan(
    model_or_path: Source,
    *,
    ram: Size,
    accelerator: Size | Mapping[str, Size] | None = None,
    storage: str | Policy | None = None,
    rows: int = 1,
    activations: Size = 0,
    order: Iterable[str] = (),
    uses: Mapping[str, float] | Uses | str | os.PathLike[str] | None = None,
    routed: int = 0,
    works_on_cpu: bool = True,
    links: Mapping[str, Any] | None = None,
    folder: str | os.PathLike[str] = ".",
) -> Plan:
    """Plans which weight rests in which tier, for the fastest pass within given bytes.

    Nothing is read but sizes; the model may be on the meta device.

    Args:
        model_or_path: a model, or the path of its files. Of one that is spread over processes what
            this one has: `rows` are then the tokens of all.
        ram: bytes of memory, or a text such as "4GiB".
        accelerator: bytes on the first accelerator, or a mapping of accelerators to bytes.
        storage: plans as if what `stowage pack` takes rested so; of a `stowage.Policy` the storage,
            which it must have alone.
        rows: rows of x (tokens) in a pass.
        activations: bytes beside the weights, where the work is.
        order: names of weights in their order of use; without, that of a model's modules, or of a
            file's names as people count them.
        uses: globs to a number of uses in a pass; an embedding that is named is used whole. Of
            experts also how often each was used in another run: what `stowage.uses` gives, or the
            file that `Uses.save` wrote.
        routed: experts of a layer that a token takes; without, as the model's config says, else
            all. Those of a layer are taken to be used alike where `uses` does not say otherwise.
        works_on_cpu: whether the CPU may multiply too.
        links: rates as `measured_links` gives them; without, those of this machine, measured once.
        folder: on the disk that a model's weights will rest on; it may be new.

    Returns:
        The plan.

    Raises:
        InvalidArgument: no plan keeps the limits; names the three largest terms and the number that
            would do.
        BadFile: the path holds no model.
        FileError: the path cannot be read.

    Example:
        >>> plan = stowage.plan(model, ram="1MiB", links=links)
        >>> plan.device_map()  # "": the whole model
        {'': 'cpu'}
    """
    if isinstance(routed, bool) or not isinstance(routed, int) or routed < 0:
        raise InvalidArgument(f"stowage.plan: routed must be a number of experts, got {routed!r}")
    model = described(model_or_path)
    on_disk = model["path"] or _there(Path(folder))
    rates = measured_links(on_disk) if links is None else links
    request = model | {
        "ram": byte_count(ram, "ram"),
        "accelerators": _accelerators(accelerator),
        "uses": [[glob, float(n)] for glob, n in uses.items()] if isinstance(uses, Mapping) else [],
        "storage": _planned(storage),
        "rows": rows,
        "activations": byte_count(activations, "activations"),
        "works_on_cpu": works_on_cpu,
        "order": list(order) or [unit["name"] for unit in model["units"]],
        "routed": routed,
        "config": config_of(model_or_path),
        "routing": _routing(uses),
    }
    return Plan(_called(library.plan_make, json.dumps(request), json.dumps(dict(rates))))


def _planned(given: str | Policy | None) -> object:
    if not isinstance(given, Policy):
        return given
    return given.only("stowage.plan", "storage").to_dict().get("storage")


def _routing(uses: Mapping[str, float] | Uses | str | os.PathLike[str] | None) -> str:
    if uses is None or isinstance(uses, Mapping):
        return ""
    if isinstance(uses, Uses):
        return uses.to_json()
    if not isinstance(uses, str | os.PathLike):
        raise InvalidArgument(
            f"stowage.plan: uses must be a mapping, stowage.Uses or the path of some, got {uses!r}"
        )
    return read_text(uses)


def machine_key() -> str:
    """Names this machine, for plans that are made for one.

    Returns:
        CPU, cores, memory and kernel, in words.

    Example:
        >>> from stowage.planning import machine_key
        >>> machine_key() == machine_key()
        True
    """
    return _called(library.machine_key)


def measured_links(path: str | os.PathLike[str] = ".", *, anew: bool = False) -> dict[str, Any]:
    """What this machine, and the disk that `path` lies on, move and multiply: bytes per second.

    It is measured once, for some seconds, and kept (docs/env.md).

    Args:
        path: a folder on the disk in question.
        anew: measures in any case.

    Returns:
        Names of links to rates, and "key", the machine.

    Example:
        >>> links = stowage.measured_links()
        >>> links["disk"] > 0  # bytes per second
        True
    """
    rates: dict[str, Any] = json.loads(_called(library.links_measure, os.fspath(path), anew))
    return rates


def _there(folder: Path) -> str:
    """The folder, or what it will be made in."""
    whole = folder.absolute()
    return str(next(path for path in (whole, *whole.parents) if path.exists()))


def _accelerators(given: Size | Mapping[str, Size] | None) -> list[Sequence[Any]]:
    if given is None:
        return []
    if isinstance(given, Mapping):
        return [(str(n), byte_count(size, f"accelerator {n}")) for n, size in given.items()]
    here = torch.accelerator.current_accelerator(check_available=True)
    name = f"{here.type}:{here.index or 0}" if here is not None else "cuda:0"
    return [(name, byte_count(given, "accelerator"))]


def _called(op: Any, *arguments: Any) -> str:
    try:
        given = op(*arguments)
    except RuntimeError as error:
        raise translated(error) from None
    return library.text(given) if given is not None else ""


def collapsed(places: Mapping[str, str]) -> dict[str, str]:
    """Names of weights to places, with a module's name for all below it where they have one place;
    "" for the whole model. No name of the result contains another."""
    below: dict[str, set[str]] = {}
    for name, place in places.items():
        for path in _around(name):
            below.setdefault(path, set()).add(place)
    found: dict[str, str] = {}
    for name, place in places.items():
        widest = next((p for p in _around(name) if len(below[p]) == 1), name)
        found[widest] = place
    return found


def _around(name: str) -> list[str]:
    """The modules that contain a weight, the widest first: "", "a", "a.b" of "a.b.weight"."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(len(parts))]

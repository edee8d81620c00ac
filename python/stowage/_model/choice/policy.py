# SPDX-License-Identifier: Apache-2.0
"""How the weights of a model rest and work, as one object that every door takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import cached_property
from typing import Any

import torch
from torch import nn

from stowage._model.choice.by_error import Limits
from stowage._model.choice.calibration import Calibration
from stowage._model.choice.selection import Rules, Selection, Wish
from stowage._model.choice.skips import Skip
from stowage._model.rest.formation import Making
from stowage._model.rest.granularity import Blocks, Granularity, InputCast
from stowage._model.weights import Choice, Inventory
from stowage._ops.errors import InvalidArgument
from stowage._ops.storage import Storage


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Which weights of a model rest, as what, and how they work.

    `stow`, `load`, `plan`, `quantized_init`, and the configurations for transformers, diffusers and
    Fabric take one in the place of a storage. It comes alone: their arguments of the same names
    are for those who have none. `dataclasses.replace` makes another of it.

    Args:
        storage: a storage string, a list of such to choose from by measured errors, or None: the
            defaults let nothing rest.
        rules: a glob over parameter names and module paths, a regular expression, a module type or
            a predicate (name, module), to a storage, a list of storages or None (stay plain). The
            first match decides; `storage` decides by the defaults what no rule matches.
        skip: patterns that stay plain whatever a rule says, or "diffusion", "language" or "auto".
        allow_unmatched: permits rules and skips that match nothing.
        max_error: the largest relative error that a weight may have.
        on_exceed: what a weight above it does: "plain" or "raise".
        calibrate: runs the model on samples, so that errors are those of the modules' outputs.
        budget: bytes for all resting weights together (an int, or a text such as "2GiB").
        compute_dtype: what every floating parameter and buffer works in; without, each keeps its
            own.
        exact: makes linear layers bit-equal to dense ones with the dequantized weights.
        keep_nonfinite: keeps NaN and infinities (casts, nf4, fp4) instead of refusing them.
        measure: fills the errors of the report, which takes one more pass over the values.
        buffers: lets rules name buffers too.
        working: how much is widened at once: "tile", "layer" or "block".
        blocks: the modules whose weights are widened together.
        input_cast: the modules whose inputs are cast to the compute dtype.

    Raises:
        InvalidArgument: a value that is none, or that means nothing beside the others.

    Example:
        >>> policy = stowage.Policy("nf4", rules={"2.*": "int8:row"}, exact=True)
        >>> [choice.storage.name for choice in policy.choose(model) if choice.storage]
        ['nf4:block64', 'int8:row']
        >>> policy.to_dict()
        {'storage': 'nf4', 'rules': {'2.*': 'int8:row'}, 'exact': True}
    """

    storage: Wish = field(default=None, kw_only=False)
    rules: Rules | None = None
    skip: Skip = None
    allow_unmatched: bool = False
    max_error: float | None = None
    on_exceed: str = "plain"
    calibrate: Calibration | None = None
    budget: int | str | None = None
    compute_dtype: torch.dtype | None = None
    exact: bool = False
    keep_nonfinite: bool = False
    measure: bool = True
    buffers: bool = False
    working: str | None = None
    blocks: Blocks = None
    input_cast: InputCast = None

    def __post_init__(self) -> None:
        for name in _COLLECTIONS:  # a caller's may change, or be read once
            object.__setattr__(self, name, _kept(getattr(self, name)))
        if isinstance(self.calibrate, Iterator):
            object.__setattr__(self, "calibrate", tuple(self.calibrate))
        _ = self.selection, self.limits, self.grain, self.making  # what they refuse is refused here

    @classmethod
    def of(cls, given: Wish | Policy, where: str, **said: Any) -> Policy:
        """What the arguments of a door mean.

        Args:
            given: its storage, or a policy, which comes alone.
            where: the door's name.
            said: its arguments of the names that a policy has.

        Returns:
            The policy.

        Raises:
            InvalidArgument: a policy with an argument beside it; what the class refuses.
        """
        if not isinstance(given, Policy):
            return cls(given, **said)
        beside = [name for name, value in said.items() if _differs(name, value)]
        if beside:
            raise InvalidArgument(
                f"{where}: a policy must come alone, got it with {', '.join(beside)} "
                "(dataclasses.replace(policy, ...) makes another)"
            )
        return given

    def only(self, where: str, *names: str) -> Policy:
        """Refuses what a door cannot do.

        Args:
            where: the door's name.
            names: of the arguments that it takes.

        Returns:
            The same policy.

        Raises:
            InvalidArgument: any other argument is not as by default.
        """
        others = [f for f in self.said() if f not in names]
        if others:
            raise InvalidArgument(
                f"{where}: a policy must have no more than {', '.join(names)}, got "
                f"{', '.join(others)}"
            )
        return self

    def said(self) -> dict[str, Any]:
        """The arguments that are not as by default.

        Returns:
            Their values by name.
        """
        every = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in every.items() if _differs(name, value)}

    def to_dict(self) -> dict[str, Any]:
        """The arguments that are not as by default, as JSON has them.

        Returns:
            What `from_dict` takes.

        Raises:
            InvalidArgument: one that JSON cannot hold: a pattern that is no glob, or `calibrate`.
        """
        return {name: _plain(name, value) for name, value in self.said().items()}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Policy:
        """The policy that `to_dict` told.

        Args:
            given: arguments by name.

        Returns:
            The policy.

        Raises:
            InvalidArgument: a name that is none; what the class refuses.
        """
        said = dict(given)
        for name in said:
            if name not in _DEFAULTS:
                near = "".join(f"; {one}?" for one in get_close_matches(name, _DEFAULTS, 1))
                raise InvalidArgument(
                    f"stowage: an argument of a policy must be one of {', '.join(_DEFAULTS)}, got "
                    f"{name!r}{near}"
                )
        if isinstance(dtype := said.get("compute_dtype"), str):
            said["compute_dtype"] = getattr(torch, dtype, dtype)
        return cls(said.pop("storage", None), **said)

    def choose(self, model: nn.Module) -> list[Choice]:
        """What the patterns and the defaults say about each parameter of a model; `stow` chooses
        among several storages by errors.

        Args:
            model: any module.

        Returns:
            One choice for each parameter, and with `buffers` for each buffer; tied ones once.
        """
        return self.selection.choices(Inventory(model), self.buffers)

    def __getstate__(self) -> dict[str, Any]:
        return self.said()  # and nothing of what was parsed: pickles would name its classes

    def __setstate__(self, said: dict[str, Any]) -> None:
        for name, value in (_DEFAULTS | said).items():
            object.__setattr__(self, name, value)

    @cached_property
    def selection(self) -> Selection:
        """Its patterns, parsed."""
        return Selection.parse(self.storage, self.rules, self.skip, self.allow_unmatched)

    @cached_property
    def limits(self) -> Limits:
        """Its errors and bytes, parsed."""
        return Limits.parse(self.max_error, self.on_exceed, self.calibrate, self.budget)

    @cached_property
    def grain(self) -> Granularity:
        """Its way to work, parsed."""
        return Granularity.parse(self.working, self.blocks, self.input_cast, self.exact)

    @cached_property
    def making(self) -> Making:
        """How it makes weights, parsed."""
        return Making(self.compute_dtype, self.grain.exact, self.keep_nonfinite, self.measure)

    @property
    def compares(self) -> bool:
        """Whether the errors of all weights decide, so that none can rest before all are there."""
        several = any(
            len(wanted) > 1
            for wanted in (self.selection.default, *(to for _, to in self.selection.rules))
        )
        return several or self.budget is not None or self.max_error is not None


Policy.__module__ = "stowage.policy"  # pickles name it
_COLLECTIONS = ("storage", "rules", "skip", "blocks", "input_cast")
_DEFAULTS = {each.name: each.default for each in fields(Policy)}


def _kept(value: Any) -> Any:
    """The same, of its own; what is no collection, or none that is legal, as it is."""
    if isinstance(value, Mapping):
        return {key: _kept(one) for key, one in value.items()}
    if isinstance(value, list | tuple | Iterator):
        return tuple(value)
    return frozenset(value) if isinstance(value, set) else value


def _differs(name: str, value: object) -> bool:
    default = _DEFAULTS[name]
    if default is None or isinstance(default, bool):
        return value is not default
    return value != default


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_key(name, key): _plain(name, one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(name, one) for one in value]
    if isinstance(value, frozenset):
        return sorted(_plain(name, one) for one in value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Storage):
        return value.name
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise InvalidArgument(f"stowage: {name} must be what JSON can hold, got {value!r}")


def _key(name: str, key: Any) -> str:
    if isinstance(key, str):
        return key
    raise InvalidArgument(f"stowage: {name} must be globs, which JSON can hold, got {key!r}")

# SPDX-License-Identifier: Apache-2.0
"""What each candidate of one weight costs: relative error, clipped values, bytes. Candidates are
made, measured and dropped one at a time, so no more than one exists at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from stowage._model.reports.table import number_text
from stowage._model.rest.formation import Making, from_values, unfit
from stowage._model.rest.masters import fresh_master
from stowage._model.sizes import Seen, memory, new_bytes
from stowage._model.weights import Choice, Held
from stowage._ops.errors import StowageError
from stowage._ops.storage import Storage
from stowage._tensor.stowed import StowedTensor


@dataclass(frozen=True)
class Tried:
    """One candidate: its relative error, or why the weight cannot rest so."""

    storage: Storage | None  # None: stays as it is
    error: float = 0.0
    saturated: int = 0
    problem: str = ""

    def keeps(self, bound: float | None) -> bool:
        """Whether it is possible, within `bound`, and clips nothing where there is a bound."""
        if self.problem or bound is None or self.storage is None:
            return not self.problem
        return self.error <= bound and self.saturated == 0

    @property
    def name(self) -> str:
        return "as it is" if self.storage is None else self.storage.name

    def __str__(self) -> str:
        if self.storage is None:
            return "plain"
        clipped = f" with {self.saturated} clipped" if self.saturated else ""
        return f"{self.name} {self.problem or number_text(self.error)}{clipped}"


AS_IT_IS = Tried(None)


@dataclass(frozen=True)
class Trial:
    """A weight that has candidates, and what became of those that were tried."""

    choice: Choice
    tried: tuple[Tried, ...]
    measure: str = "weight"  # or output

    @property
    def held(self) -> Held:
        return self.choice.held

    @property
    def possible(self) -> list[Storage]:
        return [t.storage for t in self.tried if t.storage is not None and not t.problem]

    def with_outputs(self, errors: dict[tuple[str, Storage], float]) -> Trial:
        """The same with errors of outputs, where calibration found them."""
        name = self.held.name
        if not any((name, storage) in errors for storage in self.possible):
            return replace(self, measure="weight, which no input reached")
        new = (
            t if t.problem or t.storage is None else replace(t, error=errors[name, t.storage])
            for t in self.tried
        )
        return replace(self, tried=tuple(new), measure="output")

    def settled(self, pick: Tried, aim: str) -> Choice:
        """The choice with one storage, and what was tried for it."""
        told = f"{aim} of the {self.measure}: {', '.join(map(str, self.tried))}"
        reason = f"{self.choice.reason}; {told}" if self.choice.reason else told
        return replace(self.choice, storage=pick.storage, others=(), reason=reason)

    def size(self, pick: Tried, compute: torch.dtype) -> int:
        """Bytes of the weight with this candidate."""
        tensor = self.held.tensor
        if pick.storage is not None:
            layout = pick.storage.for_values(tensor.dtype).layout(tensor.shape)
            return sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in layout)
        if isinstance(tensor, StowedTensor):
            return tensor.nbytes_at_rest
        return tensor.numel() * compute.itemsize


def source(held: Held, restow: bool) -> torch.Tensor | None:
    """The values that a storage is made from, as `stow` takes them: of a resting weight its master
    or, where it may be quantized again, its dequantized values. None: it stays as it rests."""
    if not isinstance(held.tensor, StowedTensor):
        return held.tensor.detach()
    master = fresh_master(held)
    if master is not None:
        return master.kept.read().to(held.tensor.device)
    return held.tensor.dequantize(torch.float32) if restow else None


def attempt(
    choice: Choice, values: torch.Tensor, how: Making, enough: float | None, problems: list[str]
) -> Trial:
    """Measures the candidates of `choice` in their order, up to the first that keeps `enough`; all
    for None. Where none is possible the reason goes to `problems`."""
    tried: list[Tried] = []
    for storage in choice.candidates:
        tried.append(_try(choice.held, values, storage, how))
        if enough is not None and tried[-1].keeps(enough):
            break
    if all(t.problem for t in tried):
        problems.append(f"{choice.held.name}: {tried[0].problem}")
    return Trial(choice, tuple(tried))


def _try(held: Held, values: torch.Tensor, storage: Storage | None, how: Making) -> Tried:
    if storage is None:
        return AS_IT_IS
    problem = unfit(held.name, values, storage)
    if problem:
        return Tried(storage, math.inf, problem=problem)
    measuring = replace(how, measure=True)
    try:
        _, loss = from_values(values, storage, measuring, held.tensor.dtype)
    except StowageError as error:
        return Tried(storage, math.inf, problem=str(error))
    assert loss is not None
    return Tried(storage, loss.relative_error, loss.saturated)


def bytes_at_rest(held: Sequence[Held], compute: Sequence[torch.dtype]) -> int:
    """Of parameters that nobody stows, in the dtypes they will have; shared memory once."""
    seen: Seen = set()
    total = 0
    for one, dtype in zip(held, compute, strict=True):
        tensor = one.tensor
        plain = not isinstance(tensor, StowedTensor)
        if plain and tensor.is_floating_point() and tensor.dtype != dtype:
            total += tensor.numel() * dtype.itemsize
        elif not tensor.is_meta:
            total += new_bytes(memory(tensor), seen)
    return total

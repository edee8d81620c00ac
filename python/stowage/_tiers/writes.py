# SPDX-License-Identifier: Apache-2.0
"""Weights of an offloaded model that were written to: they have left the file for good, and count
in the budget or are in the engine's journal. Modules remember which of their parameters went to the
disk, so that new names (PEFT wraps layers), new tensors and copies of the model change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import Tensor, nn

from stowage._model.sizes import Seen, memory, new_bytes
from stowage._model.weights import Held
from stowage._ops.memory import is_borrowed

_ATTRIBUTE = "_stowage_on_disk"  # of a module: names of its parameters


def note_places(moved: Iterable[Held]) -> None:
    for held in moved:
        for site in held.sites:
            site.module.__dict__.setdefault(_ATTRIBUTE, set()).add(site.attribute)


def forget_places(model: nn.Module) -> None:
    for module in model.modules():
        module.__dict__.pop(_ATTRIBUTE, None)


def has_places(module: nn.Module) -> bool:
    """Whether any of its own parameters went to the disk."""
    return bool(module.__dict__.get(_ATTRIBUTE))


def written_bytes(model: nn.Module) -> int:
    """Bytes in memory of what was on the disk."""
    seen: Seen = set()
    return sum(new_bytes(parts, seen) for parts in _written(model))


def move_written(model: nn.Module, most: int, copy: Callable[[Tensor], Tensor]) -> None:
    """Replaces the memory of what was on the disk by that of its `copy`, where it exceeds `most`
    bytes."""
    seen: Seen = set()
    kept = 0
    for parts in _written(model):
        size = new_bytes(parts, seen)
        if kept + size <= most:
            kept += size
        else:
            for part in parts:
                part.data = copy(part)


def _written(model: nn.Module) -> Iterator[list[Tensor]]:
    """The parts in memory of each weight that was on the disk."""
    for module in model.modules():
        for name in module.__dict__.get(_ATTRIBUTE, ()):
            tensor = getattr(module, name, None)
            if tensor is not None and not tensor.is_meta:
                yield [part for part in memory(tensor) if not is_borrowed(part)]

# SPDX-License-Identifier: Apache-2.0
"""Weights of an offloaded model that were written to: they have left the file for good.

Modules remember which of their parameters went to the disk, so that new names (PEFT wraps layers),
new tensors and copies of the model change nothing. What was written counts in the budget of its
model; what memory has no room for goes to a journal: a file without a name, mapped, so that the
system keeps of it what it can and the rest is read again when used. A process that forks has its
journal in common with the child: from then on neither writes to what is there, but copies it first.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from stowage._model.sizes import Seen, memory, new_bytes
from stowage._model.weights import Held
from stowage._ops.errors import FileError
from stowage._ops.memory import is_borrowed, octets
from stowage._tiers.forks import Living

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


class Written:
    """Bytes by model. Those of a model that is gone count no more."""

    def __init__(self) -> None:
        self._bytes: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._known = (0, 0)  # models, and their bytes: a report of each pass asks

    @property
    def total(self) -> int:
        models, total = self._known
        if len(self._bytes) != models:
            models, total = self._known = (len(self._bytes), sum(self._bytes.values()))
        return total

    def beside(self, model: nn.Module) -> int:
        """Of all other models."""
        return self.total - self._bytes.get(model, 0)

    def put(self, model: nn.Module, size: int) -> None:
        self._bytes[model] = size
        self._known = (0, 0)


@dataclass(eq=False)
class _Room:
    map: weakref.ref[mmap.mmap]
    begin: int  # its address
    is_shared: bool = False  # with a process that was forked


class Journal:
    """Copies of tensors in a file of their own, which ends with the last of them. It is made in the
    first of `folders` that can be written to."""

    def __init__(self, *folders: Path) -> None:
        self._folders = folders
        self._rooms: list[_Room] = []  # none, as a rule
        _journals.add(self)

    @property
    def bytes(self) -> int:
        """Of copies that are still there."""
        return sum(len(room) for room in self._maps())

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy that can be written to. Raises FileError where no folder has room for it."""
        flat = octets(tensor)
        room = self._room(max(flat.numel(), 1))
        made = torch.frombuffer(room, dtype=torch.uint8)[: flat.numel()]
        made.copy_(flat)
        room.madvise(mmap.MADV_DONTNEED)  # written pages are the system's to keep
        self._rooms.append(_Room(weakref.ref(room, self._forget), made.data_ptr()))
        return made.view(tensor.dtype).view(tensor.shape)

    def _room(self, size: int) -> mmap.mmap:
        problems = []
        for folder in self._folders:
            try:
                with tempfile.TemporaryFile(dir=folder, prefix=".stowage-") as file:
                    os.posix_fallocate(file.fileno(), 0, size)  # a full disk says so here
                    return mmap.mmap(file.fileno(), size)
            except OSError as error:
                problems.append(f"{folder}: {error.strerror}")
        raise FileError(
            f"stowage: weights that are written to must have room beyond the budget, {size} bytes "
            f"on a disk; {'; '.join(problems)}"
        )

    def drop(self) -> None:
        """Gives back the memory that its pages are mapped to; their values stay."""
        for room in self._maps():
            room.madvise(mmap.MADV_DONTNEED)

    def is_shared(self, part: torch.Tensor) -> bool:
        """Whether a part lies in it, and a process that was forked has it too."""
        at = part.data_ptr()
        return any(room.is_shared and room.begin == at for room in self._rooms)

    def share(self) -> None:
        for room in self._rooms:
            room.is_shared = True

    def _forget(self, gone: weakref.ref[mmap.mmap]) -> None:
        self._rooms[:] = [room for room in self._rooms if room.map is not gone]

    def _maps(self) -> list[mmap.mmap]:
        return [room for one in list(self._rooms) if (room := one.map()) is not None]


_journals = Living(before=Journal.share)

# SPDX-License-Identifier: Apache-2.0
"""`offload` and `onload`: the weights of a model go to a folder and come back."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from stowage._errors import InvalidArgument, raise_problems
from stowage._files.flat import FLOAT8, Entry
from stowage._files.source import FileSource, is_aligned, octets
from stowage._memory import new_copy
from stowage._model.casts import cast_storage, is_plain, stands_for_plain, worth_offloading
from stowage._model.report import Report, remember, report
from stowage._model.sizes import byte_count, memory, nbytes
from stowage._model.weights import Held, Swap, values, written
from stowage._storage import Storage
from stowage._tiers.engine import (
    WORKERS,
    Engine,
    EngineOptions,
    attach,
    detach,
    engine_of,
    engine_problems,
)
from stowage._tiers.placing import DeviceMap, Places, device_problems
from stowage.checkpoint import FILE, save
from stowage.tensor import StowedTensor


@dataclass(frozen=True)
class _Move:
    """A weight, and its parts as the file has them."""

    held: Held
    parts: list[torch.Tensor]
    storage: Storage | None  # of a plain parameter that will rest as a cast of itself


def offload(
    model: nn.Module,
    *,
    ram: int | str,
    folder: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    device_map: DeviceMap | None = None,
    reads: str = "automatic",
    workers: int = WORKERS,
) -> Report:
    """Moves the weights of `model` to `folder` and brings them back when they are used, at most
    `ram` bytes ("2GiB") of them at a time, read ahead in the order that is learnt from use.

    Weights stay in the module: they say `cpu`, can be read, saved, copied and written anywhere, and
    no forward is changed. Resting weights go with their scales; plain floating parameters of 2 to 5
    dimensions and 64 KiB go too, as casts of themselves (`onload` makes them plain again); all
    else stays in memory. A folder that does not exist or is empty is written once, in the form of
    `stowage.save`; one that holds exactly these weights is used as it is. The files are never
    changed: a weight that is written to leaves them and stays in memory.

    `device_map` gives modules or parameters, by name, a place: "ram" (they stay as they are, beside
    the budget) or "disk" (as all that it does not name). `device`: where weights are brought, the
    CPU. `reads`: "mapped" computes straight from the page cache, "direct" reads past it, "buffered"
    through it, "automatic" chooses by what is cached. `workers` threads read ahead.

    Raises InvalidArgument for a model that is offloaded already, a budget below its largest weight,
    a device that is not there, a map with unknown or overlapping names or two places for a tie, or
    a folder that holds anything else; FileError where the disk is full or not writable. Model and
    folder are then as they were.
    """
    budget = byte_count(ram, "ram")
    if engine_of(model) is not None:
        raise InvalidArgument("stowage.offload: the model must not be offloaded, onload it first")
    every, places = written(model), Places(model, device_map)
    problems = engine_problems(reads, workers) + device_problems(device)
    problems += places.problems + places.split_ties(every)
    problems += _too_large([h for h in every if not places.stays(h)], budget)
    raise_problems("stowage.offload", problems)  # before anything is written
    with _filled(model, Path(folder)) as where:
        source = FileSource(where)
        try:
            with torch.no_grad():
                moves, problems = _compare(model, source, places)
                raise_problems(f"stowage.offload: {where}", problems)
                engine = Engine(source, EngineOptions(budget, reads, workers))
                engine.expect(move.held.name for move in moves)
                _move(moves)
            attach(model, engine, [move.held for move in moves])
        finally:
            source.close()
    return report(model)


def _too_large(every: Iterable[Held], budget: int) -> list[str]:
    """The largest weight that will move, where it alone exceeds the budget."""
    moving = [h for h in every if _goes(h)]
    largest = max(moving, key=lambda held: nbytes(held.tensor), default=None)
    if largest is None or nbytes(largest.tensor) <= budget:
        return []
    size = nbytes(largest.tensor)
    return [f"ram must hold the largest weight, {largest.name} of {size} bytes, got {budget}"]


def _goes(held: Held) -> bool:
    """Whether a tensor can rest on a disk."""
    tensor = held.tensor
    return isinstance(tensor, StowedTensor) or worth_offloading(held, tensor.dtype)


@contextmanager
def _filled(model: nn.Module, where: Path) -> Iterator[Path]:
    """The folder with a model in it. One that is empty or missing gets this one, and is as it was
    where the block raises."""
    if where.exists() and any(where.iterdir()):
        if not (where / FILE).exists() and not (where / f"{FILE}.index.json").exists():
            raise InvalidArgument(
                f"stowage.offload: {where}: must be empty or hold a model, has other files"
            )
        yield where
        return
    missing = [folder for folder in (where, *where.parents) if not folder.exists()]
    try:
        save(model, where)
        yield where
    except BaseException:
        (where / FILE).unlink(missing_ok=True)
        for folder in missing:
            if folder.exists():
                folder.rmdir()
        raise


def _compare(model: nn.Module, source: FileSource, places: Places) -> tuple[list[_Move], list[str]]:
    """What moves, and every difference between the model and the file."""
    moves: list[_Move] = []
    problems: list[str] = []
    names: set[str] = set()
    for held in written(model):
        names.update(held.names)
        entry, tensor = source.entries.get(held.name), held.tensor
        storage = tensor._storage if isinstance(tensor, StowedTensor) else None
        if entry is None:
            problems.append(f"{held.name}: must be in the file, is missing")
            continue
        mine = (tuple(tensor.shape), storage, None if storage else tensor.dtype)
        if mine != (entry.shape, entry.storage, entry.dtype) and not _same_codes(tensor, entry):
            problems.append(
                f"{held.name}: must be {_kind(*mine)} as in the model, the file has "
                f"{_kind(entry.shape, entry.storage, entry.dtype)}"
            )
            continue
        parts = source.parts(entry) if entry.storage else [source.read(entry.members[0])]
        pairs = zip(memory(tensor), parts, strict=True)
        if not all(torch.equal(octets(a), octets(b)) for a, b in pairs):
            problems.append(f"{held.name}: must have the model's values, the file has others")
        source.drop(entry)
        if places.stays(held):
            continue
        if storage is not None and all(is_aligned(part) for part in parts):
            moves.append(_Move(held, parts, None))
        elif storage is None and worth_offloading(held, tensor.dtype):
            moves.append(_Move(held, parts, cast_storage(tensor.dtype)))
    problems += [
        f"{name}: must be in the model, is only in the file"
        for name in sorted(source.entries.keys() - names)
    ]
    return moves, problems


def _move(moves: list[_Move]) -> None:
    swap = Swap()
    for move in moves:
        old = move.held.tensor
        if move.storage is not None:
            weight = StowedTensor(move.parts, move.storage, old.shape, old.dtype, exact=True)
            parameter = nn.Parameter(weight, requires_grad=old.requires_grad)
            swap.put(move.held, stands_for_plain(parameter))
    swap.commit()
    for move in moves:
        if move.storage is None:
            assert isinstance(move.held.tensor, StowedTensor)
            for mine, mapped in zip(move.held.tensor._parts(), move.parts, strict=True):
                mine.data = mapped
        else:
            remember(move.held, move.held.tensor, "offloaded")


def onload(model: nn.Module) -> Report:
    """Undoes `offload`: every weight is in memory again, plain parameters are plain again, and
    the file is let go. Raises InvalidArgument for a model that is not offloaded."""
    engine = engine_of(model)
    if engine is None:
        raise InvalidArgument("stowage.onload: the model must be offloaded, got one that is not")
    swap = Swap()
    with torch.no_grad():
        for held in values(model):
            weight = held.tensor
            if not isinstance(weight, StowedTensor):
                continue
            for part in weight._parts():
                if not part.untyped_storage().resizable():
                    part.data = new_copy(part)
            if is_plain(weight):
                plain = nn.Parameter(weight._parts()[0], requires_grad=weight.requires_grad)
                swap.put(held, plain)
        swap.commit()
    detach(model)
    return report(model)


def _same_codes(tensor: torch.Tensor, entry: Entry) -> bool:
    """Whether both are float8 without a scale: codes to a file, values to a model of its own."""
    if isinstance(tensor, StowedTensor) or entry.storage is None:
        return False
    return entry.storage.name == FLOAT8.get(tensor.dtype) and entry.shape == tuple(tensor.shape)


def _kind(shape: tuple[int, ...], storage: Storage | None, dtype: torch.dtype | None) -> str:
    return f"{list(shape)} {storage.name if storage else dtype}"

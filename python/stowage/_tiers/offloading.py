# SPDX-License-Identifier: Apache-2.0
"""`offload` and `onload`: the weights of a model go to a folder and come back."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from stowage._errors import InvalidArgument, raise_problems
from stowage._files.flat import FLOAT8, Entry
from stowage._files.source import FileSource, is_aligned, octets
from stowage._model.casts import cast_storage, is_cast_of_itself, worth_offloading
from stowage._model.report import Report, remember, report
from stowage._model.sizes import byte_count, memory
from stowage._model.weights import Held, Swap, values, written
from stowage._storage import Storage
from stowage._tiers.engine import WORKERS, Engine, attach, check_engine, detach, engine_of
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

    `reads`: "mapped" computes straight from the page cache, "direct" reads past it, "buffered"
    through it, "automatic" chooses by what is cached. `workers` threads read ahead.

    Raises InvalidArgument for a model that is offloaded already, a budget below its largest weight,
    or a folder that holds anything else; FileError where the disk is full or not writable. The
    model is then as it was.
    """
    budget = byte_count(ram, "ram")
    check_engine(reads, workers)  # before anything is written
    if engine_of(model) is not None:
        raise InvalidArgument("stowage.offload: the model must not be offloaded, onload it first")
    where = Path(folder)
    if not where.exists() or not any(where.iterdir()):
        save(model, where)
    elif not (where / FILE).exists() and not (where / f"{FILE}.index.json").exists():
        raise InvalidArgument(
            f"stowage.offload: {where}: must be empty or hold a model, has other files"
        )
    source = FileSource(where)
    try:
        with torch.no_grad():
            moves, problems = _compare(model, source)
            raise_problems(f"stowage.offload: {where}", problems)
            engine = Engine(source, budget, reads, workers)
            engine.made_plain = tuple(move.held.name for move in moves if move.storage is not None)
            engine.expect(move.held.name for move in moves)
            _move(moves)
        attach(model, engine)
    finally:
        source.close()
    return report(model)


def _compare(model: nn.Module, source: FileSource) -> tuple[list[_Move], list[str]]:
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
            swap.put(move.held, nn.Parameter(weight, requires_grad=old.requires_grad))
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
                    part.data = part.clone()
            if held.name in engine.made_plain and is_cast_of_itself(weight):
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

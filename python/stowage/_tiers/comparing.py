# SPDX-License-Identifier: Apache-2.0
"""A model beside the file that its weights are to rest in: what moves, and whether all is the
same."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from stowage._files.names import FLOAT8, Entry
from stowage._files.sources import FileSource, is_aligned
from stowage._model.sizes import memory
from stowage._model.weights import Held, worth_offloading, written
from stowage._ops.memory import octets
from stowage._ops.storage import Storage
from stowage._tensor.casts import cast_storage, is_plain
from stowage._tensor.stowed import StowedTensor
from stowage._tiers.placing import Places


@dataclass(frozen=True)
class Move:
    """A weight, and its parts as the file has them."""

    held: Held
    parts: list[torch.Tensor]
    storage: Storage | None  # of a plain parameter that will rest as a cast of itself


def compare(model: nn.Module, source: FileSource, places: Places) -> tuple[list[Move], list[str]]:
    """What moves, and every difference between the model and the file."""
    moves: list[Move] = []
    problems: list[str] = []
    names: set[str] = set()
    for held in written(model):
        names.update(held.names)
        entry, tensor = source.entries.get(held.name), held.tensor
        storage, dtype = _form(tensor)
        if entry is None:
            problems.append(f"{held.name}: must be in the file, is missing")
            continue
        mine = (tuple(tensor.shape), storage, dtype)
        if mine != (entry.shape, entry.storage, entry.dtype) and not _same_codes(tensor, entry):
            problems.append(
                f"{held.name}: must be {_kind(*mine)} as in the model, the file has "
                f"{_kind(entry.shape, entry.storage, entry.dtype)}"
            )
            continue
        parts = source.parts(entry) if entry.storage else [source.read(entry.parts[0])]
        pairs = zip(memory(tensor), parts, strict=True)
        if not all(torch.equal(octets(a), octets(b)) for a, b in pairs):
            problems.append(f"{held.name}: must have the model's values, the file has others")
        source.drop(entry)
        if places.stays(held):
            continue
        if isinstance(tensor, StowedTensor) and all(is_aligned(part) for part in parts):
            moves.append(Move(held, parts, None))
        elif not isinstance(tensor, StowedTensor) and worth_offloading(held, tensor.dtype):
            moves.append(Move(held, parts, cast_storage(tensor.dtype)))
    problems += [
        f"{name}: must be in the model, is only in the file"
        for name in sorted(source.entries.keys() - names)
    ]
    return moves, problems


def _form(tensor: torch.Tensor) -> tuple[Storage | None, torch.dtype | None]:
    """What a file should have: a storage, or plain values of a dtype, which a cast that stands for
    a plain parameter is too."""
    if not isinstance(tensor, StowedTensor):
        return None, tensor.dtype
    return (None, tensor._parts()[0].dtype) if is_plain(tensor) else (tensor._storage, None)


def _same_codes(tensor: torch.Tensor, entry: Entry) -> bool:
    """Whether both are float8 without a scale: codes to a file, values to a model of its own."""
    if isinstance(tensor, StowedTensor) or entry.storage is None:
        return False
    return entry.storage.name == FLOAT8.get(tensor.dtype) and entry.shape == tuple(tensor.shape)


def _kind(shape: tuple[int, ...], storage: Storage | None, dtype: torch.dtype | None) -> str:
    return f"{list(shape)} {storage.name if storage else dtype}"

# SPDX-License-Identifier: Apache-2.0
"""Pieces of a resting weight that rest as weights of their own: rows or columns that blocks divide.

Tensor parallelism computes with a piece, and FSDP2 spreads it over more processes; both need its
flat form. Here is what a piece is made of, whether it can be one, and how the records of columns
become those of whole rows.

Of which weight rows are, and which of its rows and columns others have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stowage._ops.storage import Storage
from stowage._shard.groups import shard_dim
from stowage._shard.records import Geometry, geometry
from stowage._tensor.stowed import StowedTensor, wrap

_TAG = 8  # bytes at the end of a record that say which row it is, where rows travel out of order


def rows_misfit(storage: Storage, shape: Sequence[int], first: int, last: int) -> str | None:
    """Why rows [first, last) have no flat form of their own; None where they have."""
    if storage.by_columns and (first, last) != (0, shape[0]):
        return "groups of its columns have rows all over it"
    if first % (each := storage.rows_together(shape)):
        return f"its piece must begin with a block of {each} rows, got row {first}"
    if not storage.flat:
        return None
    columns = math.prod(shape[1:])
    if (first * columns) % storage.block:
        return (
            f"its piece must begin with a block of {storage.block}, got element {first * columns}"
        )
    group = _group(storage)
    block, count = first * columns // storage.block, -(-last * columns // storage.block)
    if group > 1 and (block % group or (storage.scaler_block and count % group)):
        return (
            f"its piece must begin with a group of {group} block scales, got block {block}; a "
            "storage with scales in fp32 has no such groups"
        )
    return None


def columns_misfit(storage: Storage, shape: Sequence[int], parts: int) -> str | None:
    """Why a weight cannot be cut into so many pieces of its columns; None where it can."""
    if len(shape) != 2 or shape[1] % parts:
        return f"it must be a matrix whose columns {parts} divides, got {list(shape)}"
    if storage.actorder:
        return "its columns are in an order that is not that of its groups; use Shard(0)"
    if storage.by_columns:
        return "all rows share scales of its columns; use Shard(0)"
    if storage.nested:
        return "scales of scales run on across rows; use Shard(0), or scales in fp32"
    columns = shape[1] // parts
    if columns % storage.together and not storage.flat:
        return f"each piece must have {storage.numbers_together} columns, got {columns}"
    if storage.kind not in ("none", "tensor", "row") and columns % storage.block:
        return f"each piece must have whole blocks of {storage.block} columns, got {columns}"
    return None


def _group(storage: Storage) -> int:
    """Blocks that share what is not in the records."""
    return storage.outer or 1


def shared_of(
    shared: Sequence[Tensor], storage: Storage, shape: Sequence[int], first: int, last: int
) -> list[Tensor]:
    """The parts that all rows share, as rows [first, last) alone have them. The same memory."""
    group = _group(storage)
    if group == 1:
        return list(shared)
    columns = math.prod(shape[1:])
    start, stop = first * columns // storage.block, -(-last * columns // storage.block)
    return [shared[0][start // group : -(-stop // group)], *shared[1:]]


def columns_of(weight: StowedTensor, first: int, last: int) -> StowedTensor:
    """Columns [first, last) of a matrix, for which `columns_misfit` has given None."""
    storage, rows = weight._storage, weight.shape[0]
    parts, block = weight._parts(), weight._storage.block
    if storage.flat:
        codes = parts[0].view(rows, -1)[:, first // 2 : last // 2].reshape(-1, 1)
        scales = parts[1].view(rows, -1)[:, first // block : last // block].reshape(-1)
        own = [codes, scales]
    else:
        of = storage.bytes_of
        own = [parts[0][:, of(first) : of(last)].contiguous(), *parts[1:]]
        if storage.kind not in ("none", "tensor", "row"):
            span = slice(first // block, -(-last // block))
            rows_have = slice(1, 1 + storage.of_groups)
            own[rows_have] = [part[:, span].contiguous() for part in parts[rows_have]]
    return wrap(own, storage, (rows, last - first), weight._dt, weight._exact)


def join_columns(records: Sequence[Tensor], storage: Storage, rows: int, columns: int) -> Tensor:
    """Records of whole rows from those of equal pieces of their columns, in order."""
    fields = [_fields(piece, storage, columns // len(records)) for piece in records]
    outers, scales, codes = zip(*fields, strict=True)
    g = geometry(storage, (rows, columns))
    own = scales[0] if storage.kind == "row" else torch.cat(scales, 1)
    joined = torch.cat([outers[0], own, *codes], 1)
    return torch.nn.functional.pad(joined, (0, g.length - joined.shape[1]))


def take_columns(records: Tensor, storage: Storage, columns: int, first: int, last: int) -> Tensor:
    """The inverse: the records of columns [first, last)."""
    outers, scales, codes = _fields(records, storage, columns)
    if scales.shape[1] and storage.kind != "row":
        per = geometry(storage, (1, columns)).scale_bytes // -(-columns // storage.block)
        scales = scales[:, per * (first // storage.block) : per * -(-last // storage.block)]
    wide = codes.shape[1]
    codes = codes[:, first * wide // columns : last * wide // columns]
    taken = torch.cat([outers, scales, codes], 1)
    g = geometry(storage, (1, last - first))
    return torch.nn.functional.pad(taken, (0, g.length - taken.shape[1]))


def own_columns(tensor: Any, whole: Whole, records: Tensor) -> Tensor:
    """Of records of whole rows, those of the columns that this process has of a DTensor."""
    cut = next(i for i, place in enumerate(tensor.placements) if shard_dim(place) == 1)
    first = tensor.device_mesh.get_local_rank(cut) * whole.shape[1]
    return take_columns(records, whole.storage, whole.uncut[1], first, first + whole.shape[1])


def _fields(records: Tensor, storage: Storage, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    g = geometry(storage, (1, columns))
    outers, scales, codes, _ = records.split(
        [g.outer_bytes, g.scale_bytes, g.code_bytes, records.shape[1] - g.used], 1
    )
    return outers, scales, codes


# --- rows that travel out of order ----------------------------------------------------------------


def tagged(records: Tensor, first: int | None) -> Tensor:
    """Records with the numbers of their rows, from `first` on, plus 1: padding stays 0."""
    start = first or 0
    numbers = torch.arange(start + 1, start + 1 + records.shape[0], device=records.device)
    return torch.cat([records, numbers.view(-1, 1).view(torch.uint8)], 1)


def untagged(records: Tensor, rows: int) -> Tensor | None:
    """The records, if they are those of all `rows` rows in their order."""
    numbers = records[:, -_TAG:].contiguous().view(torch.int64).view(-1)
    right = torch.arange(1, rows + 1, device=records.device)
    return records[:, :-_TAG].contiguous() if torch.equal(numbers, right) else None


def is_tagged(records: Tensor, length: int) -> bool:
    return records.shape[1] == length + _TAG


class Whole(NamedTuple):
    """The weight that rows are of."""

    storage: Storage
    shape: tuple[int, ...]
    dtype: torch.dtype
    exact: bool
    span: tuple[int, int] | None = None  # rows that a gather fetches, where not all
    total: int | None = None  # columns of the weight that it is a piece of, along them

    @property
    def geometry(self) -> Geometry:
        return geometry(self.storage, self.shape)

    @property
    def shared_names(self) -> tuple[str, ...]:
        """Parts that are the same for all rows; every process has them."""
        return self.storage.part_names[self.storage.in_rows :]

    @property
    def rows(self) -> tuple[int, int]:
        """Those that a gather fetches: the first, and the one after the last."""
        return self.span or (0, self.shape[0])

    @property
    def uncut(self) -> tuple[int, ...]:
        """The shape, with the columns that are elsewhere."""
        return self.shape if self.total is None else (self.shape[0], self.total)

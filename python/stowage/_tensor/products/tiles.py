# SPDX-License-Identifier: Apache-2.0
"""Pieces of a resting weight in its compute dtype, never more than a tile of it at a time.

Rows (indices of dim 0) are widened as they are; of rows that an integer tensor names, as in
`experts[ids]` for a batch of tokens, only those. A piece of dim 1 takes its columns out of rows
that are widened some at a time, in a quarter of the tile: each row is decoded once for every piece,
and no sum is cut, so that tiles change no result but by the order of sums inside one product.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stowage._ops import library
from stowage._ops.lenders import fetched, lender_of
from stowage._tensor.products.wants import fetch_to
from stowage._tensor.slices import lying_matrix
from stowage._tensor.stowed import VALUE_DTYPES, StowedTensor
from stowage._tensor.tables import op
from stowage._tensor.views import is_first

TILE = 4 << 20  # bytes; kTileBytes of src/torch/gemm.cpp
aten = torch.ops.aten
_INTEGERS = (torch.int64, torch.int32)


class Resting(NamedTuple):
    """What ops take of a weight."""

    codes: Tensor
    scales: Sequence[Tensor]
    storage: int
    shape: Sequence[int]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def column_bytes(self) -> int:
        """Of one index of dim 1 in one row."""
        return math.prod(self.shape[2:]) * self.dtype.itemsize

    def rows(self, first: int, last: int) -> Tensor:
        ids = torch.arange(first, last, device=self.codes.device)
        weight = (self.codes, self.scales, self.storage, self.shape)
        return library.embedding(ids, *weight, self.dtype, True)

    def columns(self, rows: range, first: int, last: int) -> Tensor:
        """W[rows, first:last]"""
        size = (len(rows), last - first, *self.shape[2:])
        piece = torch.empty(size, dtype=self.dtype, device=self.codes.device)
        step = max(1, TILE // 4 // max(1, self.row_bytes))
        for at in range(rows.start, rows.stop, step):
            end = min(at + step, rows.stop)
            piece[at - rows.start : end - rows.start].copy_(self.rows(at, end)[:, first:last])
        return piece


def resting(w: StowedTensor) -> Resting:
    codes, *scales = w._parts()
    return Resting(codes, scales, w._storage.key, tuple(w.shape), w._dt)


def needs_tiles(w: StowedTensor) -> bool:
    """Whether the whole weight is more than may be widened at once."""
    if w._exact or w._dt not in VALUE_DTYPES:
        return False
    return w.numel() * w._dt.itemsize > TILE


def spans(count: int, each: int, room: int = TILE) -> Iterator[tuple[int, int]]:
    """[0, count) in pieces whose indices take `each` bytes, in `room`."""
    step = max(1, room // max(1, each))
    if step >= 32:
        step -= step % 32  # products like whole vectors
    for first in range(0, count, step):
        yield first, min(first + step, count)


def _takes_rows(t: Any, index: Any) -> bool:
    if type(t) is not StowedTensor or not t.dim() or t._dt not in VALUE_DTYPES:
        return False
    if not isinstance(index, Tensor) or index.dtype not in _INTEGERS:
        return False
    if index.device == t.device:
        return True
    return type(index) is Tensor and lender_of(t._parts()[0], index.device) is not None


def _within(index: Tensor, rows: int, first: int) -> bool:
    """Out of range, stock torch has the text of the error."""
    if index.is_meta or type(index) is not Tensor or not index.numel():
        return True
    low, high = index.aminmax()
    return first <= int(low) and int(high) < rows


def _rows(t: StowedTensor, index: Tensor) -> Tensor:
    codes, *scales = t._parts()
    if t.dim() == 3 and index.device != codes.device and index.numel():
        found = _matrices(t, index)
        if found is not None:
            return found
    return library.embedding(index, codes, scales, t._storage.key, t.shape, t._dt)


def _matrices(t: StowedTensor, index: Tensor) -> Tensor | None:
    """Of a stack that rests elsewhere than `index` is: each matrix comes once, at rest. None where
    blocks reach over several, and of what is no stack."""
    numbers, places = index.unique(return_inverse=True)
    every = numbers.tolist()
    if fetch_to(index.device, t, every) is None:
        return None
    values = []
    for number in every:
        one = lying_matrix(t, number)
        if one is None:
            return None
        with fetched(one._parts(), index.device) as (codes, *scales):
            dense = library.dequantize(codes, scales, one._storage.key, one.shape, t._dt)
        values.append(dense.mT if t._storage.transposed else dense)
    return torch.stack(values)[places]


@op(aten.index.Tensor)
def _index(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    t, (index, *others) = args
    if others or not _takes_rows(t, index) or not _within(index, t.shape[0], -t.shape[0]):
        return NotImplemented
    return _rows(t, torch.where(index < 0, index + t.shape[0], index))


@op(aten.index_select.default)
def _index_select(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    t, dim, index = args
    if not _takes_rows(t, index) or not is_first(dim, t.dim()) or index.dim() > 1:
        return NotImplemented
    if not _within(index, t.shape[0], 0):
        return NotImplemented
    return _rows(t, index.view(-1))

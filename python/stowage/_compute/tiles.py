# SPDX-License-Identifier: Apache-2.0
"""Pieces of a resting weight in its compute dtype, never more than a tile of it at a time.

Rows (indices of dim 0) are widened as they are. A piece of dim 1 takes its columns out of rows that
are widened some at a time, in a quarter of the tile: each row is decoded once for every piece, and
no sum is cut, so that tiles change no result but by the order of sums inside one product.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stowage._ops import library
from stowage.tensor import VALUE_DTYPES, StowedTensor

TILE = 4 << 20  # bytes; kTileBytes of src/torch/gemm.cpp


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
        return library.embedding(ids, self.codes, self.scales, self.storage, self.shape, self.dtype)

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

# SPDX-License-Identifier: Apache-2.0
"""Which of the blocks of a weight (values that share a scale) is farthest from its values, by stock
torch ops."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from stowage._ops.numbers.rounding import row_elements
from stowage._ops.storage import Storage


class BlockErrors:
    """Sums over each block of a weight of this storage and shape, on the CPU in fp64."""

    def __init__(self, storage: Storage, shape: Sequence[int]) -> None:
        elements, length = max(math.prod(shape), 1), row_elements(shape)
        self._size = self._row = elements
        self._each = storage.rows or 1  # so many rows have the same blocks
        self._rows = 1  # of a matrix
        if storage.rows:
            self._size, self._row, self._rows = storage.block, max(shape[-1], 1), max(shape[-2], 1)
        elif storage.kind == "row":
            self._size = max(length, 1)
        elif storage.kind == "row2":
            self._size = max(math.prod(shape[2:]), 1)
        elif storage.by_columns:  # of as many elements that lie as far apart as there are blocks
            self._size, self._row = 1, max(elements // storage.block, 1)
            self._each = self._rows = storage.block
        elif storage.block:
            self._size = storage.block
            if not storage.flat:  # blocks begin anew in each row
                self._row = max(length, 1)
        rows = elements // self._row
        blocks = -(-self._row // self._size) * (rows // self._rows) * -(-self._rows // self._each)
        self._error2 = torch.zeros(blocks, dtype=torch.float64)
        self._value2 = torch.zeros_like(self._error2)

    def add(self, first: int, error: Tensor, value: Tensor) -> None:
        """Elements from `first` on, with their errors."""
        place = torch.arange(first, first + value.numel())
        row = torch.div(place, self._row, rounding_mode="floor")
        block = torch.div(place % self._row, self._size, rounding_mode="floor")
        above = row // self._rows * -(-self._rows // self._each) + row % self._rows // self._each
        block += above * -(-self._row // self._size)
        self._error2.index_add_(0, block, error.reshape(-1).square())
        self._value2.index_add_(0, block, value.reshape(-1).square())

    def worst(self) -> Tensor:
        """The largest relative error and the first block that has it, fp64 [2]; 0 and -1 where all
        values are 0."""
        counts = self._value2 != 0
        if not bool(counts.any()):
            return torch.tensor([0.0, -1.0], dtype=torch.float64)
        relative = torch.where(counts, (self._error2 / self._value2).sqrt(), -1.0)
        largest = relative.amax()
        return torch.stack([largest, (relative == largest).nonzero()[0, 0].to(torch.float64)])

# SPDX-License-Identifier: Apache-2.0
"""Of which weight rows are, and which of its rows and columns others have."""

from typing import NamedTuple

import torch

from stowage._ops.storage import Storage
from stowage._shard.records import Geometry, geometry


class Whole(NamedTuple):
    """The weight that rows are of."""

    storage: Storage
    shape: tuple[int, ...]
    dtype: torch.dtype
    exact: bool
    span: tuple[int, int] | None = None  # rows that a gather brings, where not all
    total: int | None = None  # columns of the weight that it is a piece of, along them

    @property
    def geometry(self) -> Geometry:
        return geometry(self.storage, self.shape)

    @property
    def shared_names(self) -> tuple[str, ...]:
        """Parts that are the same for all rows; every process has them."""
        return self.storage.part_names[self.geometry.in_rows :]

    @property
    def rows(self) -> tuple[int, int]:
        """Those that a gather brings: the first, and the one after the last."""
        return self.span or (0, self.shape[0])

    @property
    def uncut(self) -> tuple[int, ...]:
        """The shape, with the columns that are elsewhere."""
        return self.shape if self.total is None else (self.shape[0], self.total)

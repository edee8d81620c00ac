# SPDX-License-Identifier: Apache-2.0
"""Bytes of one group of FSDP2 on the fullest rank: at rest, on the wire, gathered, as gradients.

A group is what one call of `fully_shard` gathers together. N rows over W shards give each rank
ceil(N / W) of them, the last ones filled with zeros; sums run over the weights of the group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from stowage._ops.storage import Storage
from stowage._shard.records import geometry
from stowage.training.gathered import storage_of
from stowage.training.recipes import RECIPES

PLAIN = "plain"
_STEP = 4  # bytes of the count of steps that torch's AdamW keeps for each parameter


@dataclass(frozen=True)
class Setting:
    """How a model is sharded and trained. Ranks are shards x copies; dtypes are torch's."""

    shards: int
    copies: int = 1  # meshes of shards that hold the same, as HSDP has them
    rest: torch.dtype = torch.float32  # of plain weights and of those that train in fp8
    compute: torch.dtype = torch.float32  # param_dtype of MixedPrecisionPolicy
    reduce: torch.dtype = torch.float32  # reduce_dtype
    reshard: bool = True  # reshard_after_forward
    micro_batches: int = 1  # each with a forward, a backward and a reduction
    states: int = 2  # tensors of a weight's size that the optimizer keeps; 2 with AdamW
    cpu: bool = False  # fp8 products are emulated, and uneven gradients copied to be filled up


class Weight(NamedTuple):
    """[rows, columns], columns 1 for a vector. `form` is plain, a recipe of fp8 training, or the
    storage that a frozen weight rests in."""

    rows: int
    columns: int
    form: str = PLAIN
    trained: bool = True

    def _storage(self) -> Storage | None:
        return None if self.form == PLAIN or self.form in RECIPES else Storage(self.form)

    def _parts(self) -> tuple[int, int]:
        """Bytes of the flat parts that rows make up, and of those that all rows share."""
        storage = Storage(self.form)
        in_rows = geometry(storage, (self.rows, self.columns)).in_rows
        sizes = [
            math.prod(size) * dtype.itemsize
            for _, dtype, size in storage.layout((self.rows, self.columns))
        ]
        return sum(sizes[:in_rows]), sum(sizes[in_rows:])

    def record(self, dtype: torch.dtype) -> int:
        """Bytes that travel for a row; those of a plain one in `dtype`."""
        if self.form == PLAIN:
            return self.columns * dtype.itemsize
        storage = self._storage() or storage_of(RECIPES[self.form])
        return geometry(storage, (self.rows, self.columns)).length

    def at_rest(self, setting: Setting) -> int:
        """Of the rows of a rank, and of what all rows share, which every rank has."""
        rows = -(-self.rows // setting.shards)
        if self._storage() is not None:
            return rows * self.record(setting.rest) + self._parts()[1]
        return rows * self.columns * setting.rest.itemsize

    def opened(self, setting: Setting) -> int:
        """What layers compute with: flat parts, or the records themselves, filled rows too."""
        if self._storage() is not None:
            return self._parts()[0]
        return -(-self.rows // setting.shards) * setting.shards * self.record(setting.compute)

    def scratch(self, setting: Setting, backward: bool = True) -> int:
        """fp32 copies of the weight in an emulated product: one; in g W with scales of rows the
        values, these scaled, and clamped."""
        if self.form not in RECIPES or not setting.cpu:
            return 0
        copies = 3 if RECIPES[self.form].rows and backward else 1
        return copies * 4 * self.rows * self.columns


@dataclass(frozen=True)
class Group:
    """The weights of one `fully_shard`, in the module's order."""

    weights: tuple[Weight, ...]
    keep: bool = False  # stays gathered after its forward, as the outermost module does

    def _rows(self, weight: Weight, setting: Setting) -> int:
        return -(-weight.rows // setting.shards)

    @property
    def trained(self) -> tuple[Weight, ...]:
        return tuple(w for w in self.weights if w.trained)

    def rest(self, setting: Setting) -> int:
        """Between two steps."""
        return sum(w.at_rest(setting) for w in self.weights)

    def share(self, setting: Setting) -> int:
        """What a rank gives to one gather."""
        return sum(self._rows(w, setting) * w.record(setting.compute) for w in self.weights)

    def buffer(self, setting: Setting) -> int:
        """What a gather is received in; one shard needs none."""
        return setting.shards * self.share(setting) if setting.shards > 1 else 0

    def made(self, setting: Setting) -> int:
        """Shares that are no part of what rests: fp8 codes, plain ones in another dtype."""
        if setting.shards == 1:
            return 0
        fresh = [w for w in self.weights if w.form in RECIPES]
        fresh += [w for w in self.weights if w.form == PLAIN and setting.compute != setting.rest]
        return sum(self._rows(w, setting) * w.record(setting.compute) for w in fresh)

    def gathering(self, setting: Setting) -> int:
        """While shares are cast, with two fp32 copies of one shard; then shares and buffer."""
        most = done = 0
        for w in self.weights if setting.shards > 1 else ():
            if w.form in RECIPES:
                most = max(most, done + 2 * 4 * self._rows(w, setting) * w.columns)
                done += self._rows(w, setting) * w.record(setting.compute)
        return max(most, self.made(setting) + self.buffer(setting))

    def opening(self, setting: Setting) -> int:
        """Out of the buffer: a copy for each weight; records of frozen ones give way to flat parts
        one by one."""
        held = setting.shards * self.share(setting)
        most = held
        for w in self.weights:
            if w.form != PLAIN and w.form not in RECIPES:
                most = max(most, held + w.opened(setting))
                records = setting.shards * self._rows(w, setting) * w.record(setting.compute)
                held += w.opened(setting) - records
        return most

    def work(self, setting: Setting) -> int:
        """Gathered, between opening and resharding."""
        return sum(w.opened(setting) for w in self.weights)

    def gradients(self, setting: Setting) -> int:
        """Of whole weights, as the backward gives them."""
        return sum(w.rows * w.columns for w in self.trained) * setting.compute.itemsize

    def computing(self, setting: Setting) -> int:
        """Gradients that are there while the backward goes from the last weight to the first, and
        the scratch of emulated products."""
        most = done = 0
        for w in reversed(self.weights):
            most = max(most, done + w.scratch(setting))
            done += w.rows * w.columns * setting.compute.itemsize * w.trained
        return max(most, done)

    def filling(self, setting: Setting) -> int:
        """Copies of gradients whose rows the shards do not divide."""
        uneven = [w for w in self.trained if w.rows % setting.shards]
        rows = [self._rows(w, setting) * setting.shards * w.columns for w in uneven]
        return sum(rows) * setting.compute.itemsize if setting.cpu else 0

    def _shard_elements(self, setting: Setting) -> int:
        return sum(self._rows(w, setting) * w.columns for w in self.trained)

    def reduced(self, setting: Setting) -> int:
        """What a rank gets of one reduction, in the dtype of the reduction."""
        return self._shard_elements(setting) * setting.reduce.itemsize

    def kept_gradients(self, setting: Setting) -> int:
        """Until the optimizer's step, in the dtype of the weights."""
        return self._shard_elements(setting) * setting.rest.itemsize

    def optimizer(self, setting: Setting) -> int:
        """States of the rows of a rank."""
        if not setting.states:
            return 0
        steps = _STEP * len(self.trained) if setting.states > 1 else 0
        return setting.states * self._shard_elements(setting) * setting.rest.itemsize + steps

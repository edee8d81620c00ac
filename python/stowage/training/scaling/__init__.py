# SPDX-License-Identifier: Apache-2.0
"""What sharded training costs at any number of ranks: bytes on the wire, collectives, memory, on
the fullest rank. Closed formulas; docs/scaling.md has them, `python -m stowage.training.scaling`
prints them for decoders.

A group is what one call of `fully_shard` gathers together. N rows over W shards give each rank
ceil(N / W) of them, the last ones filled with zeros; sums run over the weights of the group. What a
step sends, and the most memory that it needs, follow from the order in which FSDP2 of torch 2.13
gathers, frees and reduces. Activations, scratch of products and staging of the backend (gloo copies
what it sends) are not in them.

Decoders have the proportions that open ones of 8 to 400 billion weights share: width h a multiple
of 128, h / 128 blocks; keys and values a quarter of the heads; feed-forward 3.5 h wide with a gate:
13 h^2 weights in the linear layers of a block. Embedding and head apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from stowage._ops.storage import Storage
from stowage._shard.records import geometry
from stowage.training.gathered_weight import storage_of
from stowage.training.recipes import RECIPES
from stowage.training.scale_refresh import entry_bytes

__all__ = [
    "PLAIN",
    "Group",
    "Memory",
    "Setting",
    "Weight",
    "Wire",
    "decoder",
    "elements",
    "memory",
    "width_of",
    "wire",
]

PLAIN = "plain"
_STEP = 4  # bytes of the count of steps that torch's AdamW keeps for each parameter
_STRIDE = 128  # of widths
_MOST = 1 << 10  # strides: 131,072 wide


@dataclass(frozen=True)
class Setting:
    """How a model is sharded and trained. Ranks are shards x copies; dtypes are torch's.

    Example:
        >>> from stowage.training.scaling import Setting
        >>> Setting(shards=8, copies=2, compute=torch.bfloat16).reshard
        True
    """

    shards: int  # ranks that a weight is spread over
    copies: int = 1  # meshes of shards that hold the same, as HSDP has them
    rest: torch.dtype = torch.float32  # of plain weights and of those that train in fp8
    compute: torch.dtype = torch.float32  # param_dtype of MixedPrecisionPolicy
    reduce: torch.dtype = torch.float32  # reduce_dtype
    reshard: bool = True  # reshard_after_forward
    micro_batches: int = 1  # each with a forward, a backward and a reduction
    states: int = 2  # tensors of a weight's size that the optimizer keeps; 2 with AdamW
    cpu: bool = False  # fp8 products are emulated, and uneven gradients copied to be filled up


class Weight(NamedTuple):
    """[rows, columns], columns 1 for a vector. Its methods count bytes of one rank in a `Setting`.

    `form` is plain, a recipe of fp8 training, or the storage that a frozen weight rests in.

    Example:
        >>> from stowage.training.scaling import Setting, Weight
        >>> Weight(4096, 4096, "int8:row").at_rest(Setting(shards=8))  # 512 of 4100 bytes
        2099200
    """

    rows: int  # of its values
    columns: int  # 1: a vector
    form: str = PLAIN
    trained: bool = True  # False: frozen

    def _storage(self) -> Storage | None:
        return None if self.form == PLAIN or self.form in RECIPES else Storage(self.form)

    def _parts(self) -> tuple[int, int]:
        """Bytes of the flat parts that rows make up, and of those that all rows share."""
        storage = Storage(self.form)
        sizes = [
            math.prod(size) * dtype.itemsize
            for _, dtype, size in storage.layout((self.rows, self.columns))
        ]
        return sum(sizes[: storage.in_rows]), sum(sizes[storage.in_rows :])

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
        """Of an emulated product: the weight in fp32; in g W with scales of rows its values, these
        scaled, and codes."""
        if self.form not in RECIPES or not setting.cpu:
            return 0
        each = 4 + 4 + 1 if RECIPES[self.form].rows and backward else 4
        return each * self.rows * self.columns


@dataclass(frozen=True)
class Group:
    """The weights of one `fully_shard`, in the module's order. Its methods count bytes of one rank.

    Example:
        >>> from stowage.training.scaling import Group, Setting, Weight
        >>> Group((Weight(64, 64), Weight(64, 1))).rest(Setting(shards=2))
        8320
    """

    weights: tuple[Weight, ...]  # in the module's order
    keep: bool = False  # stays gathered after its forward, as the outermost module does

    def _rows(self, weight: Weight, setting: Setting) -> int:
        return -(-weight.rows // setting.shards)

    @property
    def trained(self) -> tuple[Weight, ...]:
        """The weights that are not frozen."""
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


@dataclass(frozen=True)
class Wire:
    """What one rank gives to collectives in one step: calls, and bytes. `wire` counts it.

    Example:
        >>> from stowage.training.scaling import Group, Setting, Weight, wire
        >>> wire([Group((Weight(64, 64),))], Setting(shards=2)).gathers
        2
    """

    gathers: int  # calls of all-gather
    gathered: int  # bytes of shares
    reductions: int  # calls of reduce-scatter
    reduced: int  # the whole gradients of its own batch, rows filled up
    scale_reductions: int  # calls of all-reduce for scales
    scales: int  # bytes of these
    copy_reductions: int  # of gradients between meshes that hold the same
    copied: int  # bytes of these
    shards: int  # ranks that a weight is spread over
    copies: int  # meshes of shards

    @property
    def collectives(self) -> int:
        """Calls of all kinds."""
        return self.gathers + self.reductions + self.scale_reductions + self.copy_reductions

    @property
    def received(self) -> int:
        """Bytes that reach this rank, and that leave it, in rings: (W - 1) shares of a gather,
        (W - 1) / W of a reduce-scatter, twice that of an all-reduce."""
        others = self.shards - 1
        moved = self.gathered * others + self.reduced * others // self.shards
        moved += 2 * self.scales * others // self.shards
        return moved + 2 * self.copied * (self.copies - 1) // self.copies


def wire(groups: Sequence[Group], setting: Setting) -> Wire:
    """Counts what goes over the wire in a step; the first one makes the first scales besides.

    Args:
        groups: in the order of the forward.
        setting: how they are sharded.

    Returns:
        Calls and bytes of one rank.

    Example:
        >>> from stowage.training.scaling import Group, Setting, Weight, wire
        >>> wire([Group((Weight(64, 64),))], Setting(shards=2)).received  # bytes
        24576
    """
    spread, times = setting.shards > 1, setting.micro_batches
    gathers = gathered = reductions = reduced = copied = tensor_scales = 0
    for group in groups:
        each = times * (2 if setting.reshard and not group.keep else 1)
        gathers += each * spread
        gathered += each * spread * group.share(setting)
        if group.trained:
            reductions += times
            reduced += times * setting.shards * group.reduced(setting)
            copied += times * group.reduced(setting)
        forms = [RECIPES[w.form] for w in group.weights if w.form in RECIPES]
        tensor_scales += sum(not recipe.rows for recipe in forms)
    copies = setting.copies > 1
    return Wire(
        gathers=gathers,
        gathered=gathered,
        reductions=reductions * spread,
        reduced=reduced * spread,
        scale_reductions=int(bool(tensor_scales) and spread),
        scales=tensor_scales * entry_bytes() * spread,
        copy_reductions=reductions * copies,
        copied=copied * copies,
        shards=setting.shards,
        copies=setting.copies,
    )


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank, as `memory` counts them.

    `rest` and `optimizer` are there all the time; `gather` and `work` are those of the largest
    group; `peak` is of a step, all together.

    Example:
        >>> from stowage.training.scaling import Group, Setting, Weight, memory
        >>> memory([Group((Weight(64, 64),))], Setting(shards=2)).rest
        8192
    """

    rest: int
    gather: int
    work: int
    gradient: int  # until the step
    optimizer: int
    peak: int


def memory(groups: Sequence[Group], setting: Setting) -> Memory:
    """Counts the bytes of a step on the fullest rank.

    Args:
        groups: in the order of the forward.
        setting: how they are sharded.

    Returns:
        Bytes by purpose, and the peak.

    Example:
        >>> from stowage.training.scaling import Group, Setting, Weight, memory
        >>> memory([Group((Weight(64, 64),))], Setting(shards=2)).gather
        16384
    """
    rest = sum(group.rest(setting) for group in groups)
    optimizer = sum(group.optimizer(setting) for group in groups)
    gradient = sum(group.kept_gradients(setting) for group in groups)
    shards = [g.columns * -(-g.rows // setting.shards) for p in groups for g in p.trained]
    updating = gradient + (3 * max(shards, default=0) * setting.rest.itemsize)  # AdamW, in loops
    step = max(_forward(groups, setting), _backward(groups, setting), updating)
    return Memory(
        rest=rest,
        gather=max(group.buffer(setting) for group in groups),
        work=max(group.work(setting) for group in groups),
        gradient=gradient,
        optimizer=optimizer,
        peak=rest + optimizer + step,
    )


def _forward(groups: Sequence[Group], setting: Setting) -> int:
    """The buffer of a group is freed once the next group has been copied out of its own."""
    most = before = 0
    open_ = sum(g.kept_gradients(setting) for g in groups) if setting.micro_batches > 1 else 0
    for group in groups:
        buffer = group.buffer(setting)
        most = max(most, open_ + before + group.gathering(setting))
        most = max(most, open_ + before + buffer + group.opening(setting))
        scratch = max((w.scratch(setting, False) for w in group.weights), default=0)
        most = max(most, open_ + buffer + group.work(setting) + scratch)
        if group.keep or not setting.reshard:
            open_ += group.work(setting)
        before = buffer
    return most


def _backward(groups: Sequence[Group], setting: Setting) -> int:
    """From the last group to the first. While one computes, the buffer of the next is there
    already, and what the group before gave to its reduction is there still."""
    most = 0
    kept = sum(g.kept_gradients(setting) for g in groups) if setting.micro_batches > 1 else 0
    stay = [group.keep or not setting.reshard for group in groups]
    open_ = sum(g.work(setting) for g, stays in zip(groups, stay, strict=True) if stays)
    sent = 0
    for at in range(len(groups) - 1, -1, -1):
        group, ahead, gathering = groups[at], 0, 0
        if at and not stay[at - 1]:
            ahead = groups[at - 1].buffer(setting)
            gathering = groups[at - 1].gathering(setting)
        if not stay[at]:
            most = max(most, kept + sent + open_ + group.buffer(setting) + group.opening(setting))
            open_ += group.work(setting)
        whole, given = group.gradients(setting), setting.shards * group.reduced(setting)
        most = max(most, kept + sent + open_ + max(gathering, ahead + group.computing(setting)))
        open_ -= group.work(setting)
        result = group.reduced(setting)
        if setting.reduce != setting.rest:
            result += group.kept_gradients(setting)
        sent = given if whole else sent
        most = max(most, kept + open_ + ahead + sent + max(whole + group.filling(setting), result))
        held = setting.reduce != setting.rest and setting.copies > 1  # until the backward ends
        if setting.micro_batches == 1:
            kept += group.kept_gradients(setting)
        kept += group.reduced(setting) if held else 0
    return most


def shapes(width: int) -> list[tuple[int, int]]:
    """Rows and columns of the linear layers of a block."""
    inner = width * 7 // 2
    attention = [(width, width), (width // 4, width), (width // 4, width), (width, width)]
    return [*attention, (inner, width), (inner, width), (width, inner)]


def elements(width: int, vocabulary: int) -> int:
    """Weights of the whole decoder, norms too.

    Args:
        width: of its layers, a multiple of 128.
        vocabulary: rows of the embedding and of the head.

    Returns:
        A number of weights.

    Example:
        >>> from stowage.training.scaling import elements
        >>> elements(4096, 32000) / 1e9
        7.24...
    """
    block = sum(rows * columns for rows, columns in shapes(width)) + 2 * width
    return width // _STRIDE * block + 2 * vocabulary * width + width


def width_of(weights: float, vocabulary: int) -> int:
    """The width of the decoder whose number of weights is nearest.

    Args:
        weights: how many it is to have.
        vocabulary: rows of the embedding and of the head.

    Returns:
        A multiple of 128.

    Example:
        >>> from stowage.training.scaling import width_of
        >>> width_of(7e9, 32000)
        4096
    """
    widths = range(_STRIDE, _STRIDE * _MOST + 1, _STRIDE)
    return min(widths, key=lambda width: abs(elements(width, vocabulary) - weights))


def decoder(width: int, vocabulary: int, form: str, adapter: int) -> list[Group]:
    """The groups of a decoder: embedding, each block, and the last norm with the head.

    Args:
        width: of its layers, a multiple of 128; it has width / 128 blocks.
        vocabulary: rows of the embedding and of the head.
        form: of the linear layers of blocks. A storage freezes all weights but adapters; else
            everything trains.
        adapter: columns of a low-rank adapter on each of these layers.

    Returns:
        The groups in the order of the forward.

    Example:
        >>> from stowage.training.scaling import decoder
        >>> len(decoder(256, 1000, "nf4", adapter=8))
        4
    """
    frozen = form != PLAIN and form not in RECIPES
    trained = not frozen
    linear = [Weight(rows, columns, form, trained) for rows, columns in shapes(width)]
    pairs = [
        Weight(*shape)
        for rows, columns in shapes(width)
        for shape in ((adapter, columns), (rows, adapter))
        if frozen and adapter
    ]
    norms = [Weight(width, 1, PLAIN, trained)] * 2
    block = Group((*linear, *pairs, *norms))
    table = Weight(vocabulary, width, PLAIN, trained)
    last = Group((Weight(width, 1, PLAIN, trained), table))
    return [Group((table,)), *[block] * (width // _STRIDE), last]

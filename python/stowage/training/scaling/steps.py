# SPDX-License-Identifier: Apache-2.0
"""What a step of a model of many groups sends, and the most memory that a rank needs for it.

Both follow from the order in which FSDP2 of torch 2.13 gathers, frees and reduces. Activations,
scratch of products and staging of the backend (gloo copies what it sends) are not in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stowage.training.recipes import RECIPES
from stowage.training.refreshing import entry_bytes
from stowage.training.scaling.groups import Group, Setting


@dataclass(frozen=True)
class Wire:
    """Of one rank in one step: calls, and bytes that it gives to them."""

    gathers: int
    gathered: int
    reductions: int
    reduced: int  # the whole gradients of its own batch, rows filled up
    scale_reductions: int
    scales: int
    copy_reductions: int  # of gradients between meshes that hold the same
    copied: int
    shards: int
    copies: int

    @property
    def collectives(self) -> int:
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
    """Counts of a step after the first one, which also makes the first scales."""
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
    """Bytes on the fullest rank. The first and the optimizer's last all the time; `gather` and
    `work` are those of the largest group; `peak` is of a step, all together."""

    rest: int
    gather: int
    work: int
    gradient: int
    optimizer: int
    peak: int


def memory(groups: Sequence[Group], setting: Setting) -> Memory:
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

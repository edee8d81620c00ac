# SPDX-License-Identifier: Apache-2.0
"""Quantizing a part of a weight so that the bytes are those of quantizing all of it.

A scale may depend on values that other processes have: the scale of a tensor, blocks that two rows
share, nested scales, a row that two fragments share. All of that depends on largest magnitudes
alone, so a process needs no more of the others than these. Where a scale group's largest value is
elsewhere, it is put into a place of the group that is not ours, and the whole is quantized by the
one quantizer there is. Whole rows whose scales are their own need nothing of anybody.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stowage._ops import library
from stowage._ops.errors import Unsupported, translated
from stowage._ops.numbers import stochastic
from stowage._ops.storage import Storage
from stowage._shard.records import encode

_PIECE = 1 << 20  # values that are copied at once


class Fragment(NamedTuple):
    """Elements [start, start + values.numel()) of a weight, counted flat; fp32, finite."""

    storage: Storage
    shape: tuple[int, ...]  # of the whole weight
    start: int
    values: Tensor
    by_rows: bool = False  # whether that of every process is made of whole rows

    @property
    def stop(self) -> int:
        return self.start + self.values.numel()

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.stop == math.prod(self.shape)

    @property
    def columns(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def stands_alone(self) -> bool:
        """Whether its codes and scales depend on its own values only. All processes say the same,
        whatever they have of the weight."""
        storage = self.storage
        if storage.kind == "none":
            return True
        if storage.kind == "tensor" or not self.by_rows:
            return False
        if storage.rows_together(self.shape) > 1:
            return False
        if storage.under_one_of_all:
            return False
        return not storage.flat or (not storage.nested and self.columns % storage.block == 0)

    @property
    def needs_one(self) -> bool:
        """Whether of others' values it depends on no more than the largest magnitude of all."""
        whole_groups = self.by_rows and self.storage.under_one_of_all
        return self.storage.kind == "tensor" or whole_groups


def stand_alone(storage: Storage, shape: Sequence[int]) -> bool:
    """Whether codes and scales of each index of dim 0 depend on its own values only."""
    return Fragment(storage, tuple(shape), 0, torch.empty(0), by_rows=True).stands_alone


def rows_fragment(storage: Storage, shape: Sequence[int], first: int, values: Tensor) -> Fragment:
    """Of rows from `first` on."""
    start = first * math.prod(shape[1:])
    values = values.detach().to(torch.float32).contiguous()
    return Fragment(storage, tuple(shape), start, values, by_rows=True)


def _groups(fragment: Fragment) -> tuple[int, int, int]:
    """How elements share what depends on others: pieces of the flat weight, elements of one,
    elements of a scale (the last one of a piece may have fewer)."""
    storage, shape = fragment.storage, fragment.shape
    total = math.prod(shape)
    if storage.kind == "block2":
        raise Unsupported(
            f"stowage: values of a part of a weight cannot rest as {storage}, whose blocks have "
            "rows of others; stow the weight whole and shard it then, or use block<N>"
        )
    if storage.by_columns:
        raise Unsupported(
            f"stowage: values of a part of a weight cannot rest as {storage}, whose groups have "
            "rows of others; stow the weight whole and shard it then, or use block<N>"
        )
    if storage.transposed:
        raise Unsupported(
            f"stowage: values of a part of a weight cannot rest as {storage}, whose matrices lie "
            "transposed, unless it has whole indices of dim 0; stow the weight whole and shard it "
            "then"
        )
    if storage.zero:
        raise Unsupported(
            f"stowage: values of a part of a weight cannot rest as {storage}, whose zeros depend "
            "on the least and the largest value; stow the weight whole and shard it then, or leave "
            ":zero out"
        )
    if storage.record:
        raise Unsupported(
            f"stowage: values of a part of a weight cannot rest as {storage}, whose records depend "
            "on all values of a superblock; stow the weight whole and shard it then, or use int4"
        )
    if fragment.needs_one:
        return 1, total, total
    if storage.flat:
        return 1, total, storage.block
    if storage.kind == "row2":
        inner = math.prod(shape[2:])
        return shape[0] * shape[1], inner, inner
    inner = math.prod(shape[1:])
    return shape[0], inner, inner if storage.kind == "row" else storage.block


def amax_count(fragment: Fragment) -> int:
    """Numbers that processes must compare."""
    if fragment.stands_alone:
        return 0
    pieces, inner, span = _groups(fragment)
    return pieces * -(-inner // span)


def amaxes(fragment: Fragment) -> Tensor:
    """Largest magnitudes, fp32 [amax_count]; 0 where the fragment has nothing."""
    count = amax_count(fragment)
    if count <= 1:
        return largest_of(fragment.values)[:count]
    full = _full(fragment)
    pieces, inner, span = _groups(fragment)
    grouped = torch.nn.functional.pad(full.view(pieces, inner), (0, -inner % span))
    return grouped.view(-1, span).abs().amax(1)


def largest_of(values: Tensor) -> Tensor:
    """max |x|, fp32 [1]; inf or NaN where there is one, 0 for no values. Takes no memory."""
    found: Tensor = library.amax([values])
    return found


def _full(fragment: Fragment) -> Tensor:
    full = fragment.values.new_zeros(math.prod(fragment.shape))
    full[fragment.start : fragment.stop] = fragment.values.view(-1)
    return full


def quantized(values: Tensor, storage: Storage, key: int | None, first: int = 0) -> list[Tensor]:
    """Parts, to nearest or, with a key, stochastically; element 0 is number `first` of the weight.
    Raises InvalidArgument for values that are not finite."""
    if key is not None:
        return stochastic.quantize(values, storage, key, first)
    try:
        return library.quantize(values.contiguous(), storage.key)
    except RuntimeError as error:
        raise translated(error) from None


def whole_parts(fragment: Fragment, largest: Tensor, key: int | None = None) -> list[Tensor]:
    """Parts of the weight in its flat form; the scales are right everywhere, the codes inside the
    fragment. `largest` are the amaxes over all processes."""
    if fragment.is_whole or fragment.storage.kind == "none":
        full = _full(fragment) if not fragment.is_whole else fragment.values
        return quantized(full.view(fragment.shape), fragment.storage, key)
    full, own = _full(fragment), amaxes(fragment)
    pieces, inner, span = _groups(fragment)
    each = -(-inner // span)
    number = torch.arange(pieces * each, device=full.device)
    begin = number // each * inner + number % each * span
    absent = torch.where(begin < fragment.start, begin, begin.clamp(min=fragment.stop))
    elsewhere = largest > own
    full[absent[elsewhere]] = largest[elsewhere]
    return quantized(full.view(fragment.shape), fragment.storage, key)


def row_parts(
    fragment: Fragment, largest: Tensor, key: int | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Records of the fragment's rows, and the parts that all rows share."""
    storage, shape, values = fragment.storage, fragment.shape, fragment.values
    first, count = fragment.start // fragment.columns, values.numel() // fragment.columns
    local, values = (count, *shape[1:]), values.view(count, *shape[1:])
    start = fragment.start
    if fragment.stands_alone:
        parts = quantized(values, storage, key, start) if count else _none(storage, local, values)
        return encode(parts, storage, local, 0, count), parts[storage.in_rows :]
    _groups(fragment)  # refuses what largest magnitudes of others do not tell
    if fragment.needs_one:
        parts = _with_largest(values, storage, largest, key, start)
        return encode(parts, storage, local, 0, count), parts[storage.in_rows :]
    parts = whole_parts(fragment, largest, key)
    return encode(parts, storage, shape, first, first + count), parts[storage.in_rows :]


def _with_largest(
    values: Tensor, storage: Storage, largest: Tensor, key: int | None, start: int
) -> list[Tensor]:
    """Parts of these rows of a weight whose largest magnitude is `largest`: pieces of about 2^20
    values, each with one row more that holds it."""
    count, columns = values.shape[0], math.prod(values.shape[1:])
    extra = values.new_zeros(1, *values.shape[1:])
    extra.view(-1)[0] = largest[0]
    own, step = _none(storage, tuple(values.shape), values)[: storage.in_rows], _PIECE // columns
    for at in range(0, max(count, 1), max(1, step)):
        piece = values[at : at + max(1, step)]
        fresh = quantized(torch.cat([piece, extra]), storage, key, start + at * columns)
        for into, part in zip(own, fresh, strict=False):
            into[at : at + len(piece)] = part[: len(piece)]
    return [*own, *fresh[storage.in_rows :]]


def _none(storage: Storage, shape: tuple[int, ...], like: Tensor) -> list[Tensor]:
    return [torch.empty(s, dtype=d, device=like.device) for _, d, s in storage.layout(shape)]

# SPDX-License-Identifier: Apache-2.0
"""Superblocks of ggml by stock torch ops: 256 neighbours of a row with one record of scales.

The record of q4_k, 16 bytes: f16 numbers d and e, then six bits for the scale and six for the
offset of each of eight sub-blocks of 32, which count d and e (docs/numbers.md has the packing).
That of q6_k, 18 bytes: int8 scales of sixteen sub-blocks of 16, then d, which they count.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from stowage._ops.errors import fail
from stowage._ops.numbers.packing import pack
from stowage._ops.numbers.rounding import check_finite, row_elements, rows_of, spans
from stowage._ops.storage import Storage


class Superblock(NamedTuple):
    steps: int  # sub-blocks
    inner: int  # elements of each
    most: float  # that a scale counts
    offsets: bool  # whether each has one beside its scale
    first_code: int  # what code 0 stands for


_KINDS = {"q4_k": Superblock(8, 32, 63.0, True, 0), "q6_k": Superblock(16, 16, 127.0, False, -32)}
_MOST_HALF = 65504.0


def of(storage: Storage) -> Superblock:
    return _KINDS[storage.scale_code]


def steps(records: Tensor, storage: Storage) -> tuple[Tensor, Tensor | None]:
    """Scales and offsets, if there are any, of sub-blocks in fp32, from bytes `[..., record]`."""
    if not of(storage).offsets:
        unit = records[..., 16:].contiguous().view(torch.float16).to(torch.float32)
        return unit * records[..., :16].contiguous().view(torch.int8).to(torch.float32), None
    units = records[..., :4].contiguous().view(torch.float16).to(torch.float32)
    a, b, c = records[..., 4:8], records[..., 8:12], records[..., 12:16]
    scale = torch.cat([a & 63, (c & 15) | (a >> 6 << 4)], -1)
    offset = torch.cat([b & 63, (c >> 4) | (b >> 6 << 4)], -1)
    return units[..., :1] * scale.to(torch.float32), units[..., 1:] * offset.to(torch.float32)


def spread(records: Tensor, storage: Storage, length: int) -> tuple[Tensor, Tensor | None]:
    """Of each element of rows of `length`, `[rows, length]`, from `[rows, superblocks, record]`."""
    scale, offset = (
        None
        if part is None
        else part.flatten(1).repeat_interleave(of(storage).inner, 1)[:, :length]
        for part in steps(records, storage)
    )
    assert scale is not None
    return scale, offset


def step_at(records: Tensor, storage: Storage, length: int, span: slice) -> Tensor:
    """Which of all sub-blocks has each of these elements, counted over rows of `length`."""
    kind = of(storage)
    element = torch.arange(span.start, span.stop, device=records.device)
    return element // length * (records.shape[1] * kind.steps) + element % length // kind.inner


def _unit(numbers: Tensor, most: float, storage: Storage) -> Tensor:
    """The f16 numbers that count to the largest of `numbers`, fp32 `[..., 1]`."""
    exact = numbers.amax(-1, keepdim=True) / torch.full_like(numbers[..., :1], most)
    if bool((exact > _MOST_HALF).any()):
        text = f"quantize: values must have finite scales in {storage}, got infinity"
        fail("invalid_argument", text)
    # Subnormal numbers are few: the least that is no smaller.
    exact = torch.where(exact < 2.0**-14, (exact * 2.0**24).ceil() * 2.0**-24, exact)
    return exact.to(torch.float16).to(torch.float32)


def _counts(numbers: Tensor, unit: Tensor, most: float) -> Tensor:
    counts = (numbers / unit).clamp(max=most).round()
    return torch.where(unit == 0, 0.0, counts).to(torch.uint8)


def _records(lo: Tensor, hi: Tensor, storage: Storage) -> Tensor:
    """Of superblocks whose sub-blocks reach from `lo` <= 0 to `hi` >= 0, `[..., steps]`."""
    kind, below = of(storage), 0 - lo  # no -0
    span = hi - lo if kind.offsets else torch.maximum(below, hi)
    scale = span / torch.full_like(lo, storage.divisor)
    d = _unit(scale, kind.most, storage)
    s = _counts(scale, d, kind.most)
    if not kind.offsets:
        return torch.cat([s, d.to(torch.float16).view(torch.uint8)], -1)
    e = _unit(below, kind.most, storage)
    m = _counts(below, e, kind.most)
    units = torch.cat([d, e], -1).to(torch.float16).view(torch.uint8)
    a, b = (c[..., :4] | (c[..., 4:] >> 4 << 6) for c in (s, m))
    return torch.cat([units, a, b, (s[..., 4:] & 15) | (m[..., 4:] & 15) << 4], -1)


def quantize(x: Tensor, storage: Storage) -> list[Tensor]:
    kind, rows, length = of(storage), rows_of(x.shape), row_elements(x.shape)
    codes, records = (
        torch.empty(sizes, dtype=dtype, device=x.device)
        for _, dtype, sizes in storage.layout(x.shape)
    )
    if not x.numel():
        return [codes, records]
    flat = x.reshape(rows, length)
    for span in spans(rows, length):
        v = flat[span].to(torch.float32)
        check_finite(v.reshape(-1), span.start * length)
        padded = torch.nn.functional.pad(v, (0, -length % storage.block))
        grouped = padded.view(len(v), -1, kind.steps, kind.inner)
        lo, hi = grouped.amin(3).clamp(max=0), grouped.amax(3).clamp(min=0)
        records[span] = _records(lo, hi, storage)
        scale, offset = steps(records[span], storage)
        r = torch.where(scale == 0, 0.0, torch.ones_like(scale) / scale)[..., None]
        moved = grouped * r if offset is None else grouped * r + offset[..., None] * r
        whole = moved.clamp(storage.least, storage.largest).round() - kind.first_code
        made = pack(whole.to(torch.uint8), storage.packing, storage.bits).view(len(v), -1)
        codes[span] = made[:, : codes.shape[1]]
    return [codes, records]

# SPDX-License-Identifier: Apache-2.0
"""Superblocks of ggml by stock torch ops: 256 neighbours of a row with one record of scales.

The record of q4_k, 16 bytes: f16 numbers d and e, then six bits for the scale and six for the
offset of each of eight sub-blocks of 32, which count d and e (docs/numbers.md has the packing).
"""

import torch
from torch import Tensor

from stowage._ops.errors import fail
from stowage._ops.numbers.packing import pack
from stowage._ops.numbers.rounding import check_finite, row_elements, rows_of, spans
from stowage._ops.storage import Storage

STEPS, INNER = 8, 32  # sub-blocks of a superblock, and elements of each
_MOST_COUNT, _MOST_CODE, _MOST_HALF = 63.0, 15.0, 65504.0


def steps(records: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and offsets of sub-blocks in fp32, `[..., 8]` each, from `[..., 16]` bytes."""
    units = records[..., :4].contiguous().view(torch.float16).to(torch.float32)
    a, b, c = records[..., 4:8], records[..., 8:12], records[..., 12:16]
    scale = torch.cat([a & 63, (c & 15) | (a >> 6 << 4)], -1)
    offset = torch.cat([b & 63, (c >> 4) | (b >> 6 << 4)], -1)
    return units[..., :1] * scale.to(torch.float32), units[..., 1:] * offset.to(torch.float32)


def spread(records: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Of each element of rows of `length`, `[rows, length]`, from `[rows, superblocks, 16]`."""
    scale, offset = (part.flatten(1).repeat_interleave(INNER, 1) for part in steps(records))
    return scale[:, :length], offset[:, :length]


def step_at(records: Tensor, length: int, span: slice) -> Tensor:
    """Which of all sub-blocks has each of these elements, counted over rows of `length`."""
    element = torch.arange(span.start, span.stop, device=records.device)
    return element // length * (records.shape[1] * STEPS) + element % length // INNER


def _unit(most: Tensor, storage: Storage) -> Tensor:
    """The f16 numbers that count to `most`, fp32 `[..., 1]`."""
    exact = most.amax(-1, keepdim=True) / torch.full_like(most[..., :1], _MOST_COUNT)
    if bool((exact > _MOST_HALF).any()):
        text = f"quantize: values must have finite scales in {storage}, got infinity"
        fail("invalid_argument", text)
    # Subnormal numbers are few: the least that is no smaller.
    exact = torch.where(exact < 2.0**-14, (exact * 2.0**24).ceil() * 2.0**-24, exact)
    return exact.to(torch.float16).to(torch.float32)


def _counts(numbers: Tensor, unit: Tensor) -> Tensor:
    counts = (numbers / unit).clamp(max=_MOST_COUNT).round()
    return torch.where(unit == 0, 0.0, counts).to(torch.uint8)


def _records(lo: Tensor, hi: Tensor, storage: Storage) -> Tensor:
    """Of superblocks whose sub-blocks reach from `lo` <= 0 to `hi` >= 0, `[..., 8]`."""
    scale = (hi - lo) / torch.full_like(lo, _MOST_CODE)
    below = 0 - lo  # no -0
    d, e = _unit(scale, storage), _unit(below, storage)
    s, m = _counts(scale, d), _counts(below, e)
    units = torch.cat([d, e], -1).to(torch.float16).view(torch.uint8)
    a, b = (c[..., :4] | (c[..., 4:] >> 4 << 6) for c in (s, m))
    return torch.cat([units, a, b, (s[..., 4:] & 15) | (m[..., 4:] & 15) << 4], -1)


def quantize(x: Tensor, storage: Storage) -> list[Tensor]:
    rows, length = rows_of(x.shape), row_elements(x.shape)
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
        grouped = padded.view(len(v), -1, STEPS, INNER)
        lo, hi = grouped.amin(3).clamp(max=0), grouped.amax(3).clamp(min=0)
        records[span] = _records(lo, hi, storage)
        scale, offset = steps(records[span])
        r = torch.where(scale == 0, 0.0, torch.ones_like(scale) / scale)[..., None]
        moved = grouped * r + offset[..., None] * r
        made = moved.clamp(0, _MOST_CODE).round().to(torch.uint8)
        codes[span] = pack(made, storage.packing).view(len(v), -1)[:, : codes.shape[1]]
    return [codes, records]

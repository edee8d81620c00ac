# SPDX-License-Identifier: Apache-2.0
"""nf4 and fp4 by stock torch ops, bit for bit as bitsandbytes has them (0.50 and later, on the
CPU). Nested scales are 8-bit codes of a table of 256 ascending values, a scale for each block."""

import math
import struct
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from stowage._ops.numbers.packing import pack, unpack
from stowage._ops.numbers.rounding import check_finite, spans
from stowage._ops.storage import NESTED_BLOCK, Storage

_POINTS = 65536  # evenly spaced from -1 to 1


@cache
def thresholds(storage: Storage, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Values by code; the midpoints between ascending values; the code of each ascending value."""
    values = torch.tensor(storage.values, dtype=torch.float32)
    ascending, order = values.sort(stable=True)
    middle = (ascending[:-1] + ascending[1:]) * 0.5
    return values.to(device), middle.to(device), order.to(torch.uint8).to(device)


def encode4(v: Tensor, storage: Storage) -> Tensor:
    _, middle, order = thresholds(storage, v.device)
    # A value on a midpoint takes the lower code; NaN takes the last.
    return order[torch.bucketize(v, middle, out_int32=True)]


def quantize4(x: Tensor, storage: Storage, keep: bool) -> list[Tensor]:
    block, count = storage.block, x.numel()
    codes = torch.empty(((count + 1) // 2, 1), dtype=torch.uint8, device=x.device)
    absmax = torch.empty((count + block - 1) // block, dtype=torch.float32, device=x.device)
    flat, out = x.reshape(-1), codes.view(-1)
    for span in spans(absmax.numel(), block):
        v = flat[span.start * block : span.stop * block].to(torch.float32)
        if not keep:
            check_finite(v, span.start * block)
        full = len(v) // block
        grouped = v[: full * block].view(full, block)
        largest = grouped.abs().amax(1)
        largest = torch.where(torch.isnan(largest), math.nan, largest)  # one NaN, not any
        absmax[span.start : span.start + full].copy_(largest)
        floor = absmax[span.start : span.start + full, None].clamp(min=1e-38)
        scaled = (grouped * (torch.ones_like(floor) / floor)).clamp(-1, 1).view(-1)
        if tail := len(v) % block:  # bitsandbytes divides here, and keeps the clamped scale
            last = v[-tail:].abs().amax().clamp(min=1e-38)
            absmax[-1].copy_(last)
            scaled = torch.cat([scaled, (v[-tail:] / last).clamp(-1, 1)])
        coded = encode4(torch.nn.functional.pad(scaled, (0, len(v) % 2)), storage)
        start = span.start * block // 2
        out[start : start + len(coded) // 2].copy_(pack(coded, storage.packing))
    return [codes, absmax] if not storage.nested else [codes, *nest(absmax)]


def _f32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


@cache
def nested_map(device: torch.device) -> Tensor:
    """The 256 values of an 8-bit block scale: bitsandbytes' dynamic map, CRC-32 1b137aeb.

    Each product and sum below is exact in fp64, so that _f32 rounds once.
    """
    values = [0.0, 1.0]
    for i in range(7):
        points, start = 2**i + 1, _f32(0.1)
        step = _f32(_f32(1 - start) / (points - 1))
        line = [
            _f32(start + step * k) if k < points // 2 else _f32(1 - step * (points - 1 - k))
            for k in range(points)
        ]
        for low, high in pairwise(line):
            value = _f32(_f32(10.0 ** (i - 6)) * _f32(_f32(low + high) / 2))
            values += [value, -value]
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


@cache
def _nested_points(device: torch.device) -> Tensor:
    return points(nested_map(torch.device("cpu"))).to(device)


def nest(absmax: Tensor) -> list[Tensor]:
    """Scales of blocks as 8-bit codes: absmax, nested_absmax, nested_map and nested_offset."""
    count, device = absmax.numel(), absmax.device
    total = absmax.cpu().to(torch.float64).cumsum(0)[-1:]  # in index order
    mean = float(total[0]) / count if count else 0.0
    offset = torch.tensor(mean, dtype=torch.float32, device=device)
    codes, largest = quantize_blockwise(absmax - offset, _nested_points(device), NESTED_BLOCK)
    return [codes, largest, nested_map(device).clone(), offset]


def block_scales(parts: Sequence[Tensor], blocks: slice) -> Tensor:
    if len(parts) == 2:
        return parts[1][blocks]
    _, absmax, nested, table, offset = parts
    index = torch.arange(blocks.start, blocks.stop, device=absmax.device) // NESTED_BLOCK
    return table[absmax[blocks].to(torch.int32)] * nested[index] + offset


def decode4(parts: Sequence[Tensor], storage: Storage, first: int, last: int) -> Tensor:
    """Elements [first, last) of the flat weight."""
    table, _, _ = thresholds(storage, parts[0].device)
    packed = parts[0].view(-1)[first // 2 : (last + 1) // 2]
    pairs = unpack(packed, storage.packing)
    codes = pairs[first % 2 : first % 2 + last - first].to(torch.int32)
    blocks = slice(first // storage.block, -(-last // storage.block))
    scales = block_scales(parts, blocks).repeat_interleave(storage.block)
    return table[codes] * scales[first - blocks.start * storage.block :][: last - first]


def points(table: Tensor) -> Tensor:
    """The code of each of 65,536 points between -1 and 1: uint8 [65536]."""
    middle = (table[:-1] + table[1:]) * 0.5
    places = torch.arange(_POINTS, dtype=torch.float32, device=table.device) * 2
    places = places / torch.full_like(places, _POINTS - 1) - 1
    return torch.bucketize(places, middle, out_int32=True).to(torch.uint8)


def quantize_blockwise(x: Tensor, codes_of: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Codes, uint8 in the shape of `x`, and the largest magnitude of each block of `block`
    consecutive values, fp32 [blocks]. `codes_of` is `points(table)`. A value takes the code of
    the point that it is rounded to, which need not be the nearest value; a block of zeros has
    codes 0."""
    count = x.numel()
    flat = x.reshape(-1).to(torch.float32)
    grouped = torch.nn.functional.pad(flat, (0, -count % block)).view(-1, block)
    largest = grouped.abs().amax(1) if count else grouped.new_empty(0)
    inverse = torch.ones_like(largest) / largest
    unit = (grouped * inverse[:, None]).clamp(-1, 1)
    place = ((unit + 1) * 0.5 * (_POINTS - 1) + 0.5).to(torch.int32).clamp(0, _POINTS - 1)
    codes = torch.where(largest[:, None] == 0, 0, codes_of[place])
    return codes.to(torch.uint8).view(-1)[:count].view(x.shape), largest


def dequantize_blockwise(
    codes: Tensor, largest: Tensor, table: Tensor, block: int, dtype: torch.dtype
) -> Tensor:
    """Table value times the scale of the block in fp32, rounded once to `dtype`."""
    scales = largest.to(torch.float32).repeat_interleave(block)[: codes.numel()]
    values = table[codes.reshape(-1).to(torch.int32)] * scales
    return values.view(codes.shape).to(dtype)

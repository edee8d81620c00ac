# SPDX-License-Identifier: Apache-2.0
"""8-bit codes of a table of 256 ascending values, with one scale for each block: bitsandbytes'
rule (0.50 and later, on the CPU), by stock torch ops. Nested block scales are such codes."""

import torch
from torch import Tensor

_POINTS = 65536  # evenly spaced from -1 to 1


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

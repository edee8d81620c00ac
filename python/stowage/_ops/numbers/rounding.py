# SPDX-License-Identifier: Apache-2.0
"""What the composite's codecs for 8-bit and 4-bit codes share: rounding, chunks, and the largest
magnitude of each of many tensors, which a compiler can join with what comes before.

Rules of these files: values are computed in fp32; the only things done to a bf16 or float8 tensor
are casts, views and copies (their arithmetic is missing or wrong on old hardware); a tensor is
divided by a tensor, since CUDA turns division by a number into a multiplication; temporaries stay
small.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from stowage._ops import _torch
from stowage._ops.errors import fail

CHUNK = 1 << 20  # elements that are worked on at once
_NAN_BITS = {torch.bfloat16: (16, 0x7FFF, 0x40), torch.float16: (13, 0x3FF, 0x7E00)}


def rows_of(shape: Sequence[int]) -> int:
    return shape[0] if len(shape) else 1


def row_elements(shape: Sequence[int]) -> int:
    return math.prod(shape[1:])


def spans(count: int, width: int) -> Iterator[slice]:
    """Slices of range(count) whose items, each of `width` elements, fill about one chunk."""
    step = max(1, CHUNK // max(1, width))
    return (slice(i, min(i + step, count)) for i in range(0, count, step))


def round_to_odd(x: Tensor) -> Tensor:
    """f64 to fp32 so that a second rounding, to fewer bits, gives what one rounding would."""
    near = x.to(torch.float32)
    bits = near.view(torch.int32)
    wide = near.to(torch.float64)
    move = torch.where(wide.abs() > x.abs(), -1, 1).to(torch.int32)
    inexact = (wide != x) & ~torch.isnan(x) & (bits & 1 == 0)
    return torch.where(inexact, bits + move, bits).view(torch.float32)


def check_finite(x: Tensor, first: int) -> None:
    finite = torch.isfinite(x)
    if not bool(finite.all()):
        index = int((~finite).nonzero()[0])
        fail(
            "invalid_argument",
            f"quantize: values must be finite, got {float(x[index])} at element {first + index}",
        )


def widen(x: Tensor) -> Tensor:
    """fp32, or fp64 as it is."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def round_once(v: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 (or fp64) values as a reader sees them; any NaN is the one quiet NaN."""
    if v.dtype == torch.float64 and dtype.itemsize == 2:
        v = round_to_odd(v)
    return narrow(torch.where(torch.isnan(v), math.nan, v), dtype)


def narrow(v: Tensor, dtype: torch.dtype) -> Tensor:
    """NaN keeps its sign and upper bits, which torch's casts do not promise."""
    out = v.to(dtype)
    if dtype not in _NAN_BITS or not bool(torch.isnan(v).any()):
        return out
    shift, mask, quiet = _NAN_BITS[dtype]
    bits = v.view(torch.int32)
    nan = (bits >> 16 & 0x8000) | (bits >> shift & mask) | quiet
    kept = torch.where(torch.isnan(v), nan.to(torch.int16), out.view(torch.int16))
    return kept.view(dtype)


def amaxes(values: Sequence[Tensor]) -> Tensor:
    """max |x| of each tensor, fp32 [count]: 0 for no values, the quiet NaN where there is one. All
    on one device.

    Reads each once and writes nothing: |x| of a large tensor is a copy, whose pages cost more. A
    maximum is exact in any dtype."""
    some = [v.detach() for v in values if v.numel()]
    if not some:
        where = values[0].device if values else "cpu"
        return torch.zeros(len(values), dtype=torch.float32, device=where)
    if some[0].device.type != "cpu":
        found = torch.stack([n.to(torch.float32) for n in _torch.foreach_norm(some, math.inf)])
    else:
        low, high = zip(*map(torch.aminmax, some), strict=True)
        found = torch.maximum(-_as_one(low), _as_one(high)).abs()
    found = found.masked_fill(found.isnan(), math.nan)
    if len(some) == len(values):
        return found
    every = found.new_zeros(len(values))
    every[[at for at, v in enumerate(values) if v.numel()]] = found
    return every


def _as_one(scalars: Sequence[Tensor]) -> Tensor:
    """fp32 [count]; of several dtypes, perhaps."""
    one = len({scalar.dtype for scalar in scalars}) == 1
    return torch.stack([*scalars] if one else [s.to(torch.float32) for s in scalars]).to(
        torch.float32
    )

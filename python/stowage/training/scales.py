# SPDX-License-Identifier: Apache-2.0
"""From the largest magnitude of some values to the scale that they are multiplied by before a cast.

Two rules, each bit for bit that of the library it is named after: `torchao` and `te`. In both the
scale s multiplies, q = cast(clamp(fl(x s), -F, F)), and a reader multiplies by fl(1 / s).
"""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from stowage._ops import library
from stowage._ops.errors import InvalidArgument
from stowage._ops.numbers import rounding

ScaleMode = Literal["torchao", "te"]
SCALE_MODES: tuple[str, ...] = get_args(ScaleMode)
EPS = 1e-12  # no amax counts as smaller, in the rule of torchao
_EXPONENT, _MANTISSA = 0x7F800000, 0x007FFFFF


def largest(target: torch.dtype) -> float:
    """The largest finite value of a float8 dtype: the one table of them is torch's own."""
    return torch.finfo(target).max


def amax_of(values: Tensor, dim: int | None = None) -> Tensor:
    """max |x| in fp32: of everything (a scalar, 0 for no values), or over `dim`, which stays as 1.

    NaN if there is one; an empty `dim` gives 0.
    """
    if dim is None and values.device.type == "cpu":
        return amaxes([values])[0]
    v = values.detach().abs()
    if dim is None:
        return (v.amax() if v.numel() else v.new_zeros(())).to(torch.float32)
    if not v.shape[dim]:
        shape = list(v.shape)
        shape[dim] = 1
        return v.new_zeros(shape, dtype=torch.float32)
    return v.amax(dim, keepdim=True).to(torch.float32)


def amaxes(values: Sequence[Tensor]) -> Tensor:
    """amax_of of each whole tensor, fp32 [count]; one or more, on one device. No gradient flows."""
    if torch.compiler.is_compiling():
        return rounding.amaxes(values)
    with torch.no_grad():
        found: Tensor = library.amax([*values])
    return found


def power_of_two(scale: Tensor) -> Tensor:
    """The largest power of two that is not above each fp32 value > 0; 0, inf and NaN stay.

    By masking bits, so that it is exact for every value: log2 rounds up just below a power.
    """
    if scale.dtype != torch.float32:
        raise InvalidArgument(f"power_of_two: scale must be float32, got {scale.dtype}")
    bits = scale.view(torch.int32)
    low = bits & _MANTISSA
    top = low
    for shift in (1, 2, 4, 8, 16):  # a subnormal keeps its highest bit
        top = top | (top >> shift)
    top = top ^ (top >> 1)
    exponent = bits & _EXPONENT
    masked = torch.where(exponent == 0, top, exponent)
    return torch.where(exponent == _EXPONENT, bits, masked).view(torch.float32)


def scale_of(
    amax: Tensor,
    target: torch.dtype,
    mode: str = "torchao",
    *,
    margin: int = 0,
    pow2: bool = False,
    source: torch.dtype = torch.float32,
) -> Tensor:
    """The fp32 scales of values whose largest magnitudes are `amax` (fp32, any shape).

    torchao: F / max(amax, 1e-12) in fp64, rounded to fp32; inf gives 0 and NaN gives NaN.
    te: F / amax in fp32, over 2^margin; amax 0, inf or NaN gives 1, and an infinite quotient the
    largest value of `source`, the dtype of the values.
    `pow2` rounds down to a power of two. Raises InvalidArgument for an unknown mode.
    """
    if mode == "torchao":
        wide = amax.to(torch.float64).clamp(min=EPS)
        scale = (torch.full_like(wide, largest(target)) / wide).to(torch.float32)
        scale = scale / 2.0**margin if margin else scale
    elif mode == "te":
        scale = torch.full_like(amax, largest(target)) / amax
        scale = scale / 2.0**margin if margin else scale
        most = torch.full_like(scale, torch.finfo(source).max)
        scale = torch.where(torch.isinf(scale), most, scale)
        scale = torch.where((amax == 0) | ~torch.isfinite(amax), torch.ones_like(scale), scale)
    else:
        raise InvalidArgument(f"scale_of: mode must be one of {', '.join(SCALE_MODES)}, got {mode}")
    return power_of_two(scale) if pow2 else scale

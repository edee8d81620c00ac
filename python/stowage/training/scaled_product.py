# SPDX-License-Identifier: Apache-2.0
"""Values as fp8 codes and the factor that reads them, and the product of two such matrices."""

from typing import NamedTuple

import torch
from torch import Tensor

from stowage._ops import library
from stowage._ops._torch import scaled_mm
from stowage._ops.storage import Storage
from stowage.training.recipes import largest

_CODES = {torch.float8_e4m3fn: "f8_e4m3", torch.float8_e5m2: "f8_e5m2"}
_KEYS = {  # of codes alone, of those with one scale, of those with one for each row
    (dtype, scaling): Storage(codes + scaling).key
    for dtype, codes in _CODES.items()
    for scaling in ("", ":tensor", ":row")
}


class Cast(NamedTuple):
    """A matrix as codes (float8) and `factor`, fp32: a scalar, [rows, 1] or [1, columns]."""

    codes: Tensor
    factor: Tensor

    def t(self) -> "Cast":
        """The transpose."""
        return Cast(self.codes.t(), self.factor.t() if self.factor.dim() == 2 else self.factor)

    def values(self, dtype: torch.dtype) -> Tensor:
        """What the codes stand for: one fp32 product, rounded once to `dtype`."""
        scaling = "" if self.factor.dim() else ":tensor"
        if self.factor.shape == (self.codes.shape[0], 1):
            scaling = ":row"
        if not scaling or not _by_kernel(self.codes) or not self.codes.is_contiguous():
            return wide(self.codes).mul_(self.factor).to(dtype)
        return _dequantized(self.codes, [self.factor], scaling, dtype)


def _by_kernel(values: Tensor) -> bool:
    """On a CPU torch casts to and from float8 one value at a time; a compiler does better."""
    return values.device.type == "cpu" and values.numel() > 0 and not torch.compiler.is_compiling()


def _dequantized(codes: Tensor, scales: list[Tensor], scaling: str, dtype: torch.dtype) -> Tensor:
    key = _KEYS[codes.dtype, scaling]
    found: Tensor = library.dequantize(codes.view(torch.uint8), scales, key, [*codes.shape], dtype)
    return found


def wide(codes: Tensor) -> Tensor:
    """The fp32 values of float8 codes [rows, columns], exactly, in new memory."""
    if not _by_kernel(codes):
        return codes.to(torch.float32)
    if not codes.is_contiguous() and codes.t().is_contiguous():
        return wide(codes.t()).t()
    return _dequantized(codes.contiguous(), [], "", torch.float32)


def cast(values: Tensor, scale: Tensor, target: torch.dtype) -> Cast:
    """The values times the scale in fp32, saturated, nearest even."""
    most = largest(target)
    scaled = (values.to(torch.float32) * scale).clamp_(-most, most)
    if _by_kernel(scaled):
        codes = library.quantize(scaled, _KEYS[target, ""], True)[0].view(target)
    else:
        codes = scaled.to(target)
    return Cast(codes, torch.ones_like(scale) / scale)


def high(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in their own dtype, whatever autocast says: the dtype has been chosen before."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


def product(a: Cast, b: Cast, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """a @ b: products of the codes summed in fp32, times both factors, rounded once to `dtype`.

    `fast` lets a GPU sum the products of a block in less than fp32.
    """
    if _on_device(a, b, dtype):
        return _scaled(a, b, dtype, fast)
    total = high(wide(a.codes), wide(b.codes))
    return total.mul_(a.factor).mul_(b.factor).to(dtype)


def _on_device(a: Cast, b: Cast, dtype: torch.dtype) -> bool:
    """Whether scaled_mm has kernels for this: a GPU with fp8, sizes by 16."""
    if a.codes.device.type != "cuda" or torch.version.hip:
        return False
    by_rows = a.factor.dim() == 2 or b.factor.dim() == 2
    oldest = (9, 0) if by_rows else (8, 9)
    if torch.cuda.get_device_capability(a.codes.device) < oldest:
        return False
    if by_rows and dtype != torch.bfloat16:
        return False
    (m, k), n = a.codes.shape, b.codes.shape[1]
    both_wide = a.codes.dtype == b.codes.dtype == torch.float8_e5m2
    return bool(m and not k % 16 and not n % 16 and not both_wide)


def _scaled(a: Cast, b: Cast, dtype: torch.dtype, fast: bool) -> Tensor:
    left, right = a.factor, b.factor
    if left.dim() or right.dim():  # the kernels take two scalars or two vectors
        left = left.expand(a.codes.shape[0], 1).contiguous()
        right = right.expand(1, b.codes.shape[1]).contiguous()
    columns = b.codes.t().contiguous().t()
    return scaled_mm(
        a.codes.contiguous(), columns, left, right, out_dtype=dtype, use_fast_accum=fast
    )

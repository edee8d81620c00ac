# SPDX-License-Identifier: Apache-2.0
"""The bound of docs/numbers.md ("Linear") for a product, element by element, and errors beside it.

Only what the page states is added, and only where the instruction set, the storage and the rows of
x allow the path that needs it. The term for the offsets of q4_k, 2^-23 sum m |x|, is left out: it
is far below the 2^-8 beside it, and without it the bound is the stricter one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
IN_INTEGERS = ("int4", "f4_e2m1", "mxfp4", "nvfp4", "q4_k", "uint4", "nf4", "fp4")
WITH_VNNI = ("int8:block", "q6_k", "mxint8")  # these, up to four rows, where the CPU has it


@dataclass(frozen=True)
class Way:
    """How a product is asked for."""

    storage: str
    dtype: torch.dtype
    rows: int
    exact: bool
    isa: str

    @property
    def in_integers(self) -> bool:
        """Whether the kernels may multiply in integers."""
        if self.exact or self.dtype == torch.float32 or not self.isa.startswith("avx"):
            return False
        if self.storage.startswith(WITH_VNNI):
            return self.rows <= 4
        return self.rows <= (16 if self.isa == "avx2" else 4) and self.by_name(*IN_INTEGERS)

    def by_name(self, *names: str) -> bool:
        return self.storage.split(":")[0] in names


@dataclass(frozen=True)
class Truth:
    """A product in fp64, and what errors of it are compared with."""

    x: Tensor  # fp64, [M, K]
    w: Tensor  # fp64, [N, K]: what dequantize gives in the compute dtype
    y: Tensor
    size: Tensor  # sum |x w| of each element

    @classmethod
    def of(cls, x: Tensor, w: Tensor) -> Truth:
        wide, held = x.double(), w.double()
        return cls(wide, held, wide @ held.t(), wide.abs() @ held.abs().t())

    def rows(self, count: int) -> Truth:
        return Truth(self.x[:count], self.w, self.y[:count], self.size[:count])


def of_eights(truth: Truth, apart: bool) -> Tensor:
    """sum (largest |x| sum |w|) over eight columns each; `apart`: those that nf4 and fp4 take."""
    x, w = truth.x.abs(), truth.w.abs()
    if apart and x.shape[1] % 32 == 0:
        largest = x.unflatten(1, (-1, 2, 4, 4)).amax((2, 4)).flatten(1)
        sums = w.unflatten(1, (-1, 2, 4, 4)).sum((2, 4)).flatten(1)
    else:
        largest, sums = x.unflatten(1, (-1, 8)).amax(2), w.unflatten(1, (-1, 8)).sum(2)
    return largest @ sums.t()


def bound(truth: Truth, way: Way) -> Tensor:
    columns = truth.x.shape[1]
    limit = UNIT[way.dtype] * truth.y.abs() + (columns + 8) * 2.0**-24 * truth.size
    limit += torch.finfo(way.dtype).smallest_normal * torch.finfo(way.dtype).eps
    if way.dtype == torch.bfloat16:  # subnormal factors, products and sums are zero in pairs
        sums = truth.x.abs().sum(1, keepdim=True) + truth.w.abs().sum(1) + 2 * columns
        limit += 2.0**-126 * sums
    if way.exact or way.dtype == torch.float32:
        return limit
    limit += 2.0**-8 * truth.size  # a path may skip the rounding of w
    if way.in_integers:
        limit += 2.0**-14 * of_eights(truth, way.by_name("nf4", "fp4"))
        if way.by_name("nf4"):
            limit += 2.0**-12 * truth.size
    if way.by_name("nf4", "fp4") and way.dtype == torch.bfloat16 and way.rows <= 3:
        limit += 2.0**-9 * truth.size if way.isa == "avx512bf16" else 0.0
    return limit


@dataclass(frozen=True)
class Errors:
    largest: float  # of |y - y*| / sum |x w|
    rms: float
    of_bound: float  # the largest |y - y*| over its bound

    @classmethod
    def of(cls, y: Tensor, truth: Truth, way: Way) -> Errors:
        """Results that the dtype cannot hold may be infinite, and count as exact then."""
        limit = bound(truth, way)
        beyond = truth.y.abs() + limit >= torch.finfo(way.dtype).max
        wrong = torch.where(beyond & y.isinf(), 0.0, (y.double() - truth.y).abs())
        relative = wrong / truth.size.clamp_min(torch.finfo(torch.float64).tiny)
        rms = relative.square().mean().sqrt()
        return cls(float(relative.max()), float(rms), float((wrong / limit).max()))

    @property
    def over(self) -> bool:
        """NaN is over, too."""
        return not self.of_bound <= 1

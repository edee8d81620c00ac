# SPDX-License-Identifier: Apache-2.0
"""fp8 linear layers defined again: codes by search in a table, products of decoded values."""

import bisect
import math

import numpy as np
import torch
from torch import Tensor


def table(exponent_bits: int, mantissa_bits: int) -> list[float]:
    """The finite values >= 0 of e4m3fn or e5m2, by code."""
    bias, values = 2 ** (exponent_bits - 1) - 1, []
    for code in range(128):
        exponent, mantissa = code >> mantissa_bits, code & (2**mantissa_bits - 1)
        fraction = mantissa / 2**mantissa_bits
        small = fraction * 2.0 ** (1 - bias)
        values.append(small if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias))
    return values[:127] if exponent_bits == 4 else values[:124]


TABLES = {torch.float8_e4m3fn: table(4, 3), torch.float8_e5m2: table(5, 2)}


def nearest(x: float, values: list[float]) -> float:
    """The value nearest to x, ties to the even code, saturated."""
    size = min(abs(x), values[-1])
    high = bisect.bisect_left(values, size)
    best = high
    if values[high] != size:
        below, above = size - values[high - 1], values[high] - size
        best = high - 1 if below < above or (below == above and high % 2) else high
    return math.copysign(values[best], x)


def scale(values: Tensor, dim: int | None, target: torch.dtype, pow2: bool) -> Tensor:
    v = values.double().abs()
    amax = (v.max() if dim is None else v.max(dim, keepdim=True).values).clamp(min=1e-12)
    found = (TABLES[target][-1] / amax).float()
    return torch.exp2(torch.floor(torch.log2(found.double()))).float() if pow2 else found


def cast(values: Tensor, s: Tensor, target: torch.dtype) -> tuple[Tensor, Tensor]:
    """What the codes are, as fp32, and the factor that reads them."""
    scaled = values.float() * s
    codes = [nearest(x, TABLES[target]) for x in scaled.flatten().tolist()]
    return torch.tensor(codes, dtype=torch.float32).view(values.shape), 1 / s


def multiply(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    return (((a[0] @ b[0]) * a[1]) * b[1]).to(dtype)


def turned(a: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return a[0].t(), a[1].t() if a[1].dim() == 2 else a[1]


def exact(a: Tensor, b: Tensor) -> np.ndarray:
    """The product in fp64: of fp8 codes it is exact."""
    return a.double().numpy() @ b.double().numpy()


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def linear(x: Tensor, w: Tensor, g: Tensor, recipe: str) -> tuple[Tensor, Tensor, Tensor]:
    """y, the gradient of x and that of w, without a bias; table A of docs/training.md."""
    dtype, rows = x.dtype, recipe.startswith("rowwise")
    backward = E4M3 if rows else E5M2

    def q(values: Tensor, dim: int | None, target: torch.dtype) -> tuple[Tensor, Tensor]:
        return cast(values, scale(values, dim, target, rows), target)

    wq = q(w, 1 if rows else None, E4M3)
    read = wq[0] * wq[1]
    if recipe == "gather_only":
        return x @ read.to(dtype).t(), g @ read.to(dtype), g.t() @ x
    y = multiply(q(x, 1 if rows else None, E4M3), turned(wq), dtype)
    if not rows:
        gq = q(g, None, backward)
        return y, multiply(gq, wq, dtype), multiply(turned(gq), q(x, None, E4M3), dtype)
    by = None if recipe == "rowwise_with_gw_hp" else 0
    gx = multiply(q(g, 1, backward), q(read, by, E4M3), dtype)
    if by is None:
        return y, gx, g.t() @ x
    return y, gx, multiply(turned(q(g, 0, backward)), q(x, 0, E4M3), dtype)

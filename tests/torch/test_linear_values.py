# SPDX-License-Identifier: Apache-2.0
"""The error bound of docs/numbers.md on weights that are hard to sum or to scale."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from stowage._ops import library
from stowage._ops.storage import Storage

EVERY = [
    "f32", "bf16", "f16", "f8_e4m3", "f8_e4m3:tensor", "f8_e4m3:row", "f8_e5m2:block32",
    "int8:tensor", "int8:row", "int8:block32", "nf4", "nf4:block64:nested", "fp4",
]  # fmt: skip
SHORT = ["f8_e4m3:row", "int8:block32", "nf4:block64:nested"]
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
ROWS, COLUMNS = 33, 260


def normal() -> Tensor:
    return torch.randn(ROWS, COLUMNS)


def alternating() -> Tensor:
    """Sums of large terms that cancel to nearly nothing."""
    signs = torch.where(torch.arange(COLUMNS) % 2 == 0, 1.0, -1.0)
    return 64 * signs + torch.randn(ROWS, COLUMNS) / 64


def outlier() -> Tensor:
    values = torch.randn(ROWS, COLUMNS) * 1e-3
    values[torch.arange(ROWS), torch.randint(COLUMNS, (ROWS,))] = 400.0
    return values


def half_extremes() -> Tensor:
    """The largest and the smallest normal and subnormal numbers of fp16."""
    choice = torch.tensor([65504.0, -65504.0, 2.0**-14, -(2.0**-24), 2.0**-24, 1.0])
    return choice[torch.randint(6, (ROWS, COLUMNS))]


WEIGHTS: dict[str, Callable[[], Tensor]] = {
    "normal": normal,
    "student": lambda: torch.distributions.StudentT(3.0).sample((ROWS, COLUMNS)),
    "cauchy": lambda: torch.randn(ROWS, COLUMNS).div(torch.randn(ROWS, COLUMNS)).clamp(-400, 400),
    "alternating": alternating,
    "outlier": outlier,
    "subnormal scales": lambda: torch.randn(ROWS, COLUMNS) * 2.0**-125,
    "equal": lambda: torch.full((ROWS, COLUMNS), 0.3),
    "zeros": lambda: torch.zeros(ROWS, COLUMNS),
    "half extremes": half_extremes,
}


def bounded(ours: Tensor, a: Tensor, w: Tensor) -> None:
    """u |y| + ((K + 8) 2^-24 + 2^-8) sum |a w|; the 2^-8 not in fp32. A result that has left the
    range of its dtype may be infinite; one below its normal numbers is off by one of those. torch's
    bf16 products, which serve large batches, take subnormal factors as zero."""
    exact, size = a.double() @ w, a.double().abs() @ w.abs()
    slack = 0.0 if ours.dtype == torch.float32 else 2.0**-8
    limit = UNIT[ours.dtype] * exact.abs() + ((a.shape[1] + 8) * 2.0**-24 + slack) * size
    limit += torch.finfo(ours.dtype).smallest_normal
    if ours.dtype == torch.bfloat16:
        limit += 2.0**-126 * (a.double().abs().sum(1, keepdim=True) + w.abs().sum(0))
    near = (ours.double() - exact).abs() <= limit
    beyond = exact.abs() + limit >= torch.finfo(ours.dtype).max
    assert bool((near | beyond).all()), ((ours.double() - exact).abs() / limit)[~near].max()
    assert not bool(ours.isnan().any())


def check(values: str, storage: str) -> None:
    torch.manual_seed(3)
    kind, weights = Storage(storage), WEIGHTS[values]()
    codes, *scales = library.quantize(weights, kind.key)
    for dtype in UNIT:
        w = library.dequantize(codes, scales, kind.key, weights.shape, torch.float32)
        if dtype is torch.float16 and bool((w.abs() > 65504).any()):
            continue  # its own values are infinite in fp16
        w = library.dequantize(codes, scales, kind.key, weights.shape, dtype).double()
        for rows in (1, 5, 70):
            x = torch.randn(rows, COLUMNS).to(dtype)
            y = library.linear(x, codes, scales, kind.key, ROWS, None)
            bounded(y, x, w.t())
            g = torch.randn(rows, ROWS).to(dtype)
            bounded(library.linear_grad_input(g, codes, scales, kind.key, COLUMNS), g, w)


@pytest.mark.parametrize(
    "form", [s if s in SHORT else pytest.param(s, marks=pytest.mark.nightly) for s in EVERY]
)
@pytest.mark.parametrize("values", WEIGHTS)
def test_products_keep_their_bound(values: str, form: str) -> None:
    check(values, form)


@pytest.mark.parametrize("form", SHORT)
@pytest.mark.parametrize("values", ["normal", "student", "cauchy", "outlier"])
def test_the_error_of_a_result_is_at_most_twice_the_dense_one(values: str, form: str) -> None:
    """In the root mean square over many, not element by element; and not where sums cancel or all
    weights round alike, which only the bound above holds for."""
    torch.manual_seed(3)
    kind, weights = Storage(form), WEIGHTS[values]()
    codes, *scales = library.quantize(weights, kind.key)
    for dtype in UNIT:
        w = library.dequantize(codes, scales, kind.key, weights.shape, dtype)
        for rows in (1, 5, 16, 70):
            squares = torch.zeros(2, dtype=torch.float64)
            for _ in range(0, 70, rows):  # one result of few elements is no mean
                x = torch.randn(rows, COLUMNS).to(dtype)
                exact = x.double() @ w.double().t()
                ours = library.linear(x, codes, scales, kind.key, ROWS, None).double() - exact
                dense = torch.nn.functional.linear(x, w).double() - exact
                squares += torch.stack([ours.square().sum(), dense.square().sum()])
            assert squares[0] <= 4 * squares[1], (dtype, rows, (squares[0] / squares[1]).sqrt())

# SPDX-License-Identifier: Apache-2.0
"""Casts to fp8 and back against their definitions in stock torch ops, bit for bit."""

import pytest
import torch
from torch import Tensor

from stowage.training.scaled_product import Cast, cast

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALES = (1.0, 0.37, 1e30, 1e-30, 0.0)


def codes_of(values: Tensor, scale: Tensor, target: torch.dtype) -> Tensor:
    most = torch.finfo(target).max
    return (values.float() * scale).clamp(-most, most).to(target)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def samples(target: torch.dtype) -> list[Tensor]:
    """Every bf16 and fp16 number, any fp32 bits, and each code and midpoint with its neighbours."""
    halves = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(256, 256)
    generator = torch.Generator().manual_seed(1)
    any_bits = torch.randint(-(2**31), 2**31 - 1, (64, 1024), generator=generator)
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(target).float()
    codes = codes[codes.isfinite()].sort().values
    edges = torch.cat([codes, (codes[1:] + codes[:-1]) / 2])
    near = [torch.nextafter(edges, torch.tensor(far)) for far in (1e9, -1e9)]
    return [
        halves.view(torch.bfloat16),
        halves.view(torch.float16),
        any_bits.to(torch.int32).view(torch.float32),
        torch.cat([edges, *near])[:, None],
    ]


@pytest.mark.parametrize("target", [E4M3, E5M2])
def test_codes_are_those_of_torch(target: torch.dtype) -> None:
    for values in samples(target):
        scales = [torch.tensor(s) for s in SCALES] + [torch.rand(values.shape[0], 1) + 0.1]
        for scale in scales:
            found = cast(values, scale, target)
            assert torch.equal(bits(found.codes), bits(codes_of(values, scale, target)))
            assert torch.equal(found.factor, torch.ones_like(scale) / scale)
    across = cast(values.t(), torch.tensor(0.5), target).codes
    assert torch.equal(bits(across), bits(codes_of(values.t(), torch.tensor(0.5), target)))
    assert cast(values[:0], torch.tensor(1.0), target).codes.shape == (0, 1)


@pytest.mark.parametrize("target", [E4M3, E5M2])
def test_values_are_one_product_rounded_once(target: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(16, 16).view(target)
    factors = [torch.tensor(s) for s in SCALES] + [torch.rand(16, 1), torch.rand(1, 16)]
    for factor in factors:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for given in (codes, codes.t(), codes[:, 3:], codes[:1]):
                some = factor[: len(given)] if factor.dim() and factor.shape[1] == 1 else factor
                some = some[:, : given.shape[1]] if some.dim() and some.shape[1] > 1 else some
                found = Cast(given, some).values(dtype)
                wanted = (given.float() * some).to(dtype)
                nan = wanted.isnan()
                assert torch.equal(found.isnan(), nan)
                assert torch.equal(
                    bits(found.masked_fill(nan, 0)), bits(wanted.masked_fill(nan, 0))
                )

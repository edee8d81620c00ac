# SPDX-License-Identifier: Apache-2.0
"""Codes of float8 in integers are those of torch's casts."""

import pytest
import torch

from stowage._ops.numbers.float8 import FORMATS, decoded, encoded, in_integers


def held(codes: str) -> torch.Tensor:
    """All halves, many fp32 numbers, and those between two codes, as far as the format goes."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    bytes_ = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    grid = decoded(bytes_, codes)
    grid = grid[grid.isfinite()].unique()
    middle = (grid[1:] + grid[:-1]) / 2
    torch.manual_seed(0)
    spread = torch.randn(1 << 18) * torch.exp2(torch.randint(-24, 20, (1 << 18,)))
    beside = torch.cat([middle.nextafter(grid[1:]), middle.nextafter(grid[:-1])])
    halves = [every.view(t).float() for t in (torch.bfloat16, torch.float16)]
    values = torch.cat([*halves, grid, middle, beside, spread])
    most = torch.finfo(FORMATS[codes].dtype).max
    return torch.where(values.isfinite(), values.clamp(-most, most), values)


@pytest.mark.parametrize("codes", FORMATS)
def test_codes_are_those_of_torch(codes: str) -> None:
    values = held(codes)
    if codes == "f8_e4m3":
        values = values[~values.isinf()]  # refused, or NaN by then
    found, wanted = in_integers(values, FORMATS[codes]), encoded(values, codes)
    numbers = ~values.isnan()
    assert len(values) > 350_000 and torch.equal(found[numbers], wanted[numbers])
    assert decoded(found[~numbers], codes).isnan().all()


@pytest.mark.parametrize("codes", FORMATS)
def test_codes_of_codes_are_the_same(codes: str) -> None:
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    values = decoded(every, codes)
    same = ~values.isnan()
    assert torch.equal(in_integers(values, FORMATS[codes])[same], every[same])

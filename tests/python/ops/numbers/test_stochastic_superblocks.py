# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding to superblocks: what records mean is written out again in plain Python."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stowage._ops import library
from stowage._ops.numbers import stochastic
from stowage._ops.storage import Storage

Q4_K = Storage("q4_k")
D, E = 0.0123291015625, 0.0220947265625  # numbers that f16 has


def steps(record: bytes) -> list[tuple[float, float]]:
    """Scale and offset of each of eight sub-blocks."""
    d, e = struct.unpack("<2e", record[:4])
    a, b, c = record[4:8], record[8:12], record[12:]
    low = [(d * (a[j] & 63), e * (b[j] & 63)) for j in range(4)]
    high = [(c[j] & 15 | a[j] >> 6 << 4, c[j] >> 4 | b[j] >> 6 << 4) for j in range(4)]
    return low + [(d * s, e * m) for s, m in high]


def under(records: torch.Tensor, row: int, column: int) -> tuple[float, float]:
    record = bytes(records[row, column // 256].tolist())
    return steps(record)[column % 256 // 32]


def numbers(codes: torch.Tensor) -> torch.Tensor:
    return torch.stack([codes & 15, codes >> 4], -1).flatten(1)


def on_a_grid(rows: int, columns: int, between: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Values whose scales are found again, since each sub-block reaches from code 0 to 15, and
    their distance from code 0 in scales: whole numbers, or any between."""
    blocks = torch.Size([rows, columns // 256, 8])
    s, m = torch.randint(16, 64, blocks), torch.randint(0, 64, blocks)
    s[..., 3] = m[..., 5] = 63
    shape = torch.Size([*blocks, 32])
    u = torch.rand(shape, dtype=torch.float64) * 15
    if not between:
        u = torch.randint(0, 16, shape).double()
    u[..., 7], u[..., 20] = 0, 15
    values = (s * D)[..., None] * u - (m * E)[..., None]
    return values.float().view(rows, columns), u.view(rows, columns)


@pytest.mark.parametrize("columns", [2, 44, 256, 300, 512])
def test_each_value_goes_to_a_neighbour_by_distance(columns: int) -> None:
    torch.manual_seed(0)
    sizes = torch.tensor([1.0, 1e-3, 30.0, 0.0, 2.0])[:, None]
    values = torch.randn(5, columns) * sizes + torch.tensor([0.0, 0.0, 9.0, 0.0, -7.0])[:, None]
    key, first, near = stochastic.key_of(3, "w"), 1234, library.quantize(values, Q4_K.key)
    codes, records = stochastic.quantize(values, Q4_K, key, first)
    assert torch.equal(records, near[1])  # the scales are those of rounding to nearest
    drawn, between = numbers(codes), 0
    for i, v in enumerate(values.view(-1).double().tolist()):
        scale, offset = under(records, i // columns, i % columns)
        u = min(max((v + offset) / scale, 0.0), 15.0) if scale else 0.0
        code, share = int(drawn.view(-1)[i]), u - int(u)
        assert code in (int(u), min(int(u) + 1, 15)) or (share < 1e-4 and code == round(u))
        if 1e-4 < share < 1 - 1e-4:
            between += 1
            x = stochastic.uniform(key, first + i, first + i + 1, values.device).item()
            assert code == int(u) + (x < share)
        else:
            assert code == round(u)
    assert between >= (columns - 2) * 2


@pytest.mark.parametrize("x", [0.0, 1 - 2.0**-24])
def test_values_of_the_storage_stay_as_they_are(x: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whichever number is drawn: 0 takes the upper neighbour, the largest the lower one."""
    torch.manual_seed(1)
    values, u = on_a_grid(128, 4096, between=False)
    monkeypatch.setattr(stochastic, "uniform", lambda _, a, b, __: torch.full((b - a,), x))
    codes, records = stochastic.quantize(values, Q4_K, 5)
    assert torch.equal(numbers(codes).double(), u)
    assert torch.equal(
        library.dequantize(codes, [records], Q4_K.key, values.shape, torch.float32), values
    )


def test_the_mean_of_many_seeds_is_the_value() -> None:
    torch.manual_seed(2)
    seeds, (values, u) = 100, on_a_grid(16, 512, between=True)
    total = torch.zeros_like(u)
    for seed in range(seeds):
        total += numbers(stochastic.quantize(values, Q4_K, stochastic.key_of(seed, "w"))[0])
    error, one = total / seeds - u, (1 / 6 / seeds) ** 0.5  # of a mean of draws, on average
    assert 0.9 * one < error.square().mean().sqrt() < 1.1 * one
    assert abs(error.mean()) < 4 * one / u.numel() ** 0.5


def test_rows_are_those_of_the_whole() -> None:
    torch.manual_seed(3)
    values = torch.randn(6, 300)
    whole = stochastic.quantize(values, Q4_K, 9, first=50)
    rows = stochastic.quantize(values[2:5], Q4_K, 9, first=50 + 2 * 300)
    assert all(torch.equal(a[2:5], b) for a, b in zip(whole, rows, strict=True))
    for shape in ((0, 256), (3, 0)):
        none = stochastic.quantize(torch.empty(shape), Q4_K, 9)
        assert [p.numel() for p in none] == [0, 0]


class Sizes(TorchDispatchMode):
    """Elements of the largest tensor of four bytes or more that an op made in other memory."""

    def __init__(self, given: torch.Tensor) -> None:
        super().__init__()
        self.given, self.largest = given.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        wide = isinstance(made, torch.Tensor) and made.itemsize >= 4
        if wide and made.untyped_storage().data_ptr() != self.given:
            self.largest = max(self.largest, made.numel())
        return made


@pytest.mark.parametrize("shape", [(64, 1024), (1, 65536)])
def test_scales_are_spread_a_piece_at_a_time(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stowage._ops.numbers.rounding.CHUNK", 1024)
    values = torch.randn(shape)
    with Sizes(values) as sizes:
        stochastic.quantize(values, Q4_K, 5)
    assert 1024 <= sizes.largest <= values.numel() // 16

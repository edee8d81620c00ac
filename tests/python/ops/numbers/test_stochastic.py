# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding: _ops/numbers/stochastic.py defined again in plain Python, and its
promises."""

from __future__ import annotations

import hashlib

import pytest
import torch

import stowage
from stowage._ops import library
from stowage._ops.numbers import stochastic
from stowage._ops.storage import Storage

STORAGES = [
    "f32", "bf16", "f16", "f8_e4m3", "f8_e5m2", "f8_e4m3:tensor", "f8_e5m2:row",
    "f8_e4m3:block32", "int8", "int8:tensor", "int8:block16", "nf4", "nf4:block128",
    "nf4:block64:nested", "fp4",
]  # fmt: skip
MASK = (1 << 64) - 1


def read(parts: list[torch.Tensor], storage: Storage, shape: torch.Size) -> torch.Tensor:
    return library.dequantize(parts[0], parts[1:], storage.key, shape, torch.float32)


def splitmix(key: int, index: int) -> float:
    z = (key + (index + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return ((z ^ (z >> 31)) >> 40) / 2**24


def test_the_stream_is_the_one_that_is_defined() -> None:
    key = stochastic.key_of(7, "layer.weight")
    digest = hashlib.blake2b(b"7 layer.weight", digest_size=8).digest()
    assert key == int.from_bytes(digest, "little")
    for first in (0, 1, 1 << 40):
        found = stochastic.uniform(key, first, first + 100, torch.device("cpu")).tolist()
        assert found == [splitmix(key, first + i) for i in range(100)]
    many = stochastic.uniform(key, 0, 1 << 16, torch.device("cpu"))
    assert abs(many.mean().item() - 0.5) < 0.005 and many.min() >= 0 and many.max() < 1


@pytest.mark.parametrize("name", STORAGES)
def test_each_value_goes_to_a_neighbour_by_distance(name: str) -> None:
    """The oracle: neighbours by search among all values that the scale can give, in fp64."""
    storage = Storage(name)
    torch.manual_seed(0)
    values = torch.randn(5, 67) * torch.tensor([1.0, 1e-3, 30.0, 0.0, 2.0])[:, None]
    near = library.quantize(values, storage.key)
    key = stochastic.key_of(3, "w")
    found = stochastic.quantize(values, storage, key)
    for part, same in zip(found[1:], near[1:], strict=True):
        assert torch.equal(part, same)  # the scales are those of rounding to nearest
    got = read(found, storage, values.shape)
    if name == "f32":
        assert torch.equal(got, values)
        return
    cast = storage.kind == "none"
    scales = torch.ones_like(values) if cast else stochastic._scales(near, storage, values)
    grid, _ = stochastic._table(storage)
    for i, (v, g) in enumerate(zip(values.view(-1), got.view(-1), strict=True)):
        scale = scales.view(-1)[i]
        u = (v * (1 / scale)).clamp(grid[0], grid[-1]) if scale else torch.tensor(0.0)
        below, above = grid[grid <= u].max(), grid[grid >= u].min()
        assert g in (below * scale, above * scale)
        share = float((u - below) / (above - below)) if above > below else 0.0
        if 1e-4 < share < 1 - 1e-4:
            assert g == (above if splitmix(key, i) < share else below) * scale


@pytest.mark.parametrize("name", [n for n in STORAGES if n not in ("f32", "nf4:block64:nested")])
def test_the_mean_of_many_seeds_is_the_value(name: str) -> None:
    storage = Storage(name)
    torch.manual_seed(1)
    values, seeds = torch.randn(8, 64), 200
    total = torch.zeros_like(values)
    for seed in range(seeds):
        parts = stochastic.quantize(values, storage, stochastic.key_of(seed, "w"))
        total += read(parts, storage, values.shape)
    nearest = read(library.quantize(values, storage.key), storage, values.shape) - values
    step = nearest.square().mean().sqrt()  # one draw errs by sqrt(2) of that in the mean
    assert (total / seeds - values).square().mean().sqrt() < 2 * step / seeds**0.5


@pytest.mark.parametrize("name", [n for n in STORAGES if not n.endswith("nested")])
def test_values_of_the_storage_stay_as_they_are(name: str) -> None:
    storage = Storage(name)
    values = read(library.quantize(torch.randn(9, 65), storage.key), storage, torch.Size([9, 65]))
    again = library.quantize(values, storage.key)
    for seed in range(5):
        parts = stochastic.quantize(values, storage, stochastic.key_of(seed, "w"))
        assert torch.equal(read(parts, storage, values.shape), read(again, storage, values.shape))


@pytest.mark.parametrize("name", ["nf4", "q4_k"])
def test_chunks_and_threads_do_not_matter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values, storage = torch.randn(300, 402), Storage(name)
    wanted = stochastic.quantize(values, storage, 5)
    monkeypatch.setattr("stowage._ops.numbers.rounding.CHUNK", 1000)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = stochastic.quantize(values, storage, 5)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_what_cannot_be_rounded_is_refused() -> None:
    bad = torch.tensor([[1.0, torch.nan]])
    with pytest.raises(stowage.InvalidArgument, match="finite"):
        stochastic.quantize(bad, Storage("int8"), 0)
    with pytest.raises(stowage.InvalidArgument, match="float32"):
        stochastic.quantize(bad.bfloat16(), Storage("int8"), 0)

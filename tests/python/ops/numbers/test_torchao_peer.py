# SPDX-License-Identifier: Apache-2.0
"""nf4:torchao against torchao itself, on random blocks: equal bytes under one mean.

The mean is the one number in which we differ on purpose: ours is an fp64 sum in index order, the
peer's depends on torch's vector width and threads. So the peer is given our mean here.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import stowage

torchao = pytest.importorskip(
    "torchao",
    reason="torchao is not installed (requirements/peers.txt): nothing to compare with",
    exc_type=ImportError,
)
from torchao.quantization.quantize_.workflows.nf4 import nf4_tensor  # noqa: E402

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
IDS = ("f32", "bf16", "f16", "f64")
NAMES = ("quantized_data", "quantized_scalers", "quantization_factor", "scaler_mean", "nf4")


@pytest.fixture
def same_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    def mean(self: Tensor) -> Tensor:
        total = self.double().cumsum(0)[-1] / self.numel()
        return total.to(self.dtype)

    monkeypatch.setattr(torch.Tensor, "mean", mean)


def blocks(kind: str, dtype: torch.dtype, count: int, seed: int) -> Tensor:
    """`count` blocks of 64, in rows of 4."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count // 4, 256, generator=generator)
    if kind == "heavy":
        x = x * x.abs() ** 3
    if kind == "scales":
        x = x * torch.randn(count // 4, 1, generator=generator).exp2()
    if kind == "zeros":
        x[torch.rand(count // 4, generator=generator) < 0.3] = 0
    if kind == "lattice":
        x = (x * 16).round() / 16
    if kind == "small":
        x = x * 2.0**-12
    return x.clamp(-6e4, 6e4).to(dtype)


def raw(t: Tensor) -> Tensor:
    return torch.empty(t.numel(), dtype=t.dtype).copy_(t.reshape(-1)).view(torch.uint8)


def check(x: Tensor, block: int = 64, scaler: int = 256) -> None:
    theirs = nf4_tensor.to_nf4(x, block, scaler)
    ours = stowage.quantize(x, f"nf4:torchao:block{block}:scaler{scaler}")
    for name, (mine, part) in zip(NAMES, ours.parts.items(), strict=True):
        wanted = getattr(theirs, name)
        assert part.dtype == wanted.dtype
        assert torch.equal(raw(part), raw(wanted)), (mine, x.dtype)
    values, wanted = ours.dequantize(), theirs.get_original_weight()
    nan = values.isnan()
    assert torch.equal(nan, wanted.isnan())
    assert torch.equal(raw(values[~nan]), raw(wanted[~nan])), x.dtype


KINDS = ("normal", "heavy", "scales", "zeros", "lattice", "small")


def runs(total: int) -> Iterator[tuple[str, torch.dtype, int, int]]:
    """(kind, dtype, blocks, seed) of `total` blocks or more."""
    each = 1024 if total < 100_000 else 8192
    done = seed = 0
    while done < total:
        yield KINDS[seed % 6], DTYPES[seed // 6 % 4], each, seed
        done, seed = done + each, seed + 1


def test_equal_bytes_on_20000_blocks(same_mean) -> None:
    for kind, dtype, count, seed in runs(24_576):
        check(blocks(kind, dtype, count, seed))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_equal_bytes_on_a_million_blocks(same_mean) -> None:
    for kind, dtype, count, seed in runs(1_000_000):
        check(blocks(kind, dtype, count, seed))


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_equal_bytes_in_other_sizes_and_orders(same_mean, dtype) -> None:
    for block, scaler in (
        (16, 1),
        (16, 2),
        (32, 1),
        (32, 2),
        (64, 1),
        (128, 256),
        (256, 16),
        (4096, 4),
    ):
        step = block * scaler
        x = blocks("normal", dtype, max(4, 2 * step // 64), 5).reshape(-1)
        check(x, block, scaler)  # one dimension
    check(blocks("normal", dtype, 1024, 6).t())  # not contiguous
    check(torch.full((128, 128), -0.75, dtype=dtype))  # every scale is the mean
    check(torch.zeros(128, 128, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_the_mean_differs_by_rounding_alone(dtype) -> None:
    x = blocks("heavy", dtype, 8192, 7)
    theirs = nf4_tensor.to_nf4(x).scaler_mean
    ours = stowage.quantize(x, "nf4:torchao").parts["scaler_mean"]
    assert abs(float(ours) - float(theirs)) <= 2 * torch.finfo(dtype).eps * float(ours)

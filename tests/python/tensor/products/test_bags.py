# SPDX-License-Identifier: Apache-2.0
"""EmbeddingBag and Bilinear: the values of the dense ones; only named rows, or a tile, widened."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stowage
from stowage._ops import library
from stowage._tensor.products import tiles as _tiles

STORAGES = ["f8_e4m3", "int8", "nf4", "nf4:block64:nested", "bf16"]
IDS, OFFSETS = torch.tensor([1, 40, 2, 2, 4, 1, 1]), torch.tensor([0, 3, 3, 5])


def table(storage: str, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    values = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))
    return nn.Parameter(stowage.quantize(values, storage, compute_dtype=dtype), False)


@pytest.fixture(autouse=True)
def counters() -> None:
    stowage.fallbacks(clear=True)


@pytest.fixture
def widened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes that our ops gave."""
    seen: list[tuple[int, ...]] = []

    def watched(op: Any) -> Any:
        def call(*args: Any) -> Tensor:
            out: Tensor = op(*args)
            seen.append(tuple(out.shape))
            return out

        return call

    for name in ("dequantize", "embedding"):
        monkeypatch.setattr(library, name, watched(getattr(library, name)))
    return seen


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("padding", [None, 2, 1, 63])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bag(
    mode: str, padding: int | None, storage: str, widened: list[tuple[int, ...]]
) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        w = table(storage, dtype)
        plain = w.dequantize()
        widened.clear()
        for given in ((IDS, OFFSETS), (IDS.view(7, 1), None), (IDS[:0], OFFSETS[:1])):
            options = {"mode": mode, "padding_idx": padding, "include_last_offset": False}
            wanted = F.embedding_bag(given[0], plain, given[1], **options)
            for grad in (torch.no_grad, torch.inference_mode, torch.enable_grad):
                with grad():
                    assert torch.equal(F.embedding_bag(given[0], w, given[1], **options), wanted)
        assert widened and max(rows for rows, _ in widened) <= 5
    assert stowage.fallbacks(clear=True) == {}


@pytest.mark.parametrize("padding", [None, 2])
def test_weights_of_samples_get_gradients(padding: int | None) -> None:
    w, grads = table("int8"), []
    for weight in (w, w.dequantize()):
        each = torch.linspace(-1, 1, 7).requires_grad_()
        F.embedding_bag(
            IDS, weight, OFFSETS, mode="sum", per_sample_weights=each, padding_idx=padding
        ).square().sum().backward()
        grads.append(each.grad)
    assert torch.equal(*grads)
    assert stowage.fallbacks(clear=True) == {}


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_trained_table_gets_its_gradient(mode: str) -> None:
    w, grads = table("int8"), []
    for weight in (nn.Parameter(w), w.dequantize().detach().requires_grad_()):
        F.embedding_bag(IDS, weight, OFFSETS, mode=mode, padding_idx=2).square().sum().backward()
        grads.append(weight.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_compiled_embedding_bag(mode: str) -> None:
    layer = nn.EmbeddingBag(64, 48, mode=mode, padding_idx=2)
    layer.weight = table("int8")
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(IDS, OFFSETS), layer(IDS, OFFSETS))


def test_ids_out_of_range_raise() -> None:
    with pytest.raises(stowage.InvalidArgument, match="ids must "):
        F.embedding_bag(torch.tensor([[64]]), table("int8"))


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("storage", STORAGES)
def test_bilinear(
    storage: str, tiles: bool, monkeypatch: pytest.MonkeyPatch, widened: list[tuple[int, ...]]
) -> None:
    if tiles:
        monkeypatch.setattr(_tiles, "TILE", 16 << 10)
        monkeypatch.setattr(_tiles.spans, "__defaults__", (16 << 10,))
    torch.manual_seed(0)
    layer, twin = nn.Bilinear(16, 24, 20), nn.Bilinear(16, 24, 20)
    stowage.stow(layer, rules={"weight": storage})
    with torch.no_grad():
        twin.weight.copy_(layer.weight.dequantize())
        twin.bias.copy_(layer.bias)
    inputs = [torch.randn(3, 2, n) for n in (16, 24)]
    widened.clear()
    results: list[list[Tensor]] = []
    run: Callable[..., Tensor]
    for run in (layer, twin):
        leaves = [x.clone().requires_grad_() for x in inputs]
        y = run(*leaves)
        y.square().sum().backward()
        with torch.inference_mode():
            assert torch.equal(run(*inputs), y)
        results.append([y, *(x.grad for x in leaves)])
    assert torch.equal(results[0][0], results[1][0])  # torch sums it output by output
    for got, wanted in zip(*results, strict=True):
        assert torch.allclose(got, wanted, rtol=1e-5, atol=1e-4)
    assert max(rows for rows, *_ in widened) == (10 if tiles else 20)
    assert stowage.fallbacks(clear=True) == {}

# SPDX-License-Identifier: Apache-2.0
"""frozen_linear: the values of nn.Linear after the same seed, never a float copy of the weight."""

from functools import partial
from pathlib import Path

import pytest
import torch
from storages import covering, flat_shapes, form_of_each
from torch import nn

import stowage
from stowage._model.rest import frozen
from stowage._ops.storage import Storage

STORAGES = covering(form_of_each, flat_shapes)
STORAGES += ["nf4:torchao", "nf4:torchao:block32:scaler8:f32"]
FEATURES = [(64, 48), (63, 50), (7, 1), (100, 301)]
WHOLE = [(64, 256), (1024, 48), (512, 96), (48, 4096)]  # multiples of 16384


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    parts = zip(a.parts.items(), b.parts.items(), strict=True)
    return all(m == n and torch.equal(p, q) for (m, p), (n, q) in parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("storage", STORAGES)
def test_the_values_are_those_of_nn_linear(
    storage: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen, "_PIECE", 1000)  # many pieces, uneven ones too
    packed = Storage(storage).packing == "low_first"  # whose rows begin on bytes
    for inside, out in WHOLE if "torchao" in storage else FEATURES:
        inside += inside % 2 if packed else 0
        torch.manual_seed(3)
        plain, after = nn.Linear(inside, out, dtype=dtype), torch.rand(1)
        torch.manual_seed(3)
        layer = stowage.frozen_linear(inside, out, storage, dtype=dtype)
        assert torch.equal(torch.rand(1), after)  # the generator stands where it would
        assert type(layer) is nn.Linear and layer.weight.dtype == layer.bias.dtype == dtype
        assert not any(p.requires_grad for p in layer.parameters())
        assert same(layer.weight, stowage.quantize(plain.weight, storage))
        assert torch.equal(layer.bias, plain.bias)


def test_what_it_takes() -> None:
    layer = stowage.frozen_linear(64, 48, bias=False, dtype=torch.bfloat16, exact=True)
    assert layer.bias is None and layer.weight.resting == "nf4:block64" and layer.weight._exact
    assert layer(torch.randn(2, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert stowage.frozen_linear(0, 4).weight.shape == (4, 0)
    with torch.device("meta"):
        assert stowage.frozen_linear(4, 4).weight.is_meta
    for wrong in ("nf5", "nf4:row", "nf4:torchao"):  # the last: 3072 values
        with pytest.raises(stowage.InvalidArgument):
            stowage.frozen_linear(64, 48, wrong)


@pytest.mark.parametrize("storage", STORAGES)
def test_from_meta(storage: str, tmp_path: Path) -> None:
    size = WHOLE[0] if "torchao" in storage else FEATURES[0]
    made = stowage.frozen_linear(*size, storage)
    layer = stowage.frozen_linear(*size, storage, device="meta")
    assert all(p.is_meta for p in layer.weight.parts.values()) and layer.bias.is_meta
    assert stowage.nbytes(layer) == stowage.nbytes(made)
    layer.load_state_dict(made.state_dict(), assign=True)
    assert same(layer.weight, made.weight) and not layer.weight.requires_grad
    layer = stowage.frozen_linear(*size, storage, device="meta").to_empty(device="cpu")
    layer.load_state_dict(made.state_dict())
    assert same(layer.weight, made.weight) and torch.equal(layer.bias, made.bias)
    stowage.save(made, tmp_path)
    for device in ("meta", None):
        factory = partial(stowage.frozen_linear, *size, storage, device=device)
        loaded = stowage.load(factory, tmp_path)
        assert same(loaded.weight, made.weight) and torch.equal(loaded.bias, made.bias)
        assert not loaded.weight.requires_grad


def test_no_float_copy_is_ever_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest plain tensor is a piece, whatever the storage."""
    seen: list[int] = []
    stock = torch.Tensor.uniform_

    def uniform_(self: torch.Tensor, *args: float, **kwargs: object) -> torch.Tensor:
        if not self.is_meta:
            seen.append(self.numel())
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "uniform_", uniform_)
    for storage in ("nf4:block64:nested", "nf4:torchao", "int8:tensor", "f8_e4m3:row"):
        seen.clear()
        with torch.profiler.profile(profile_memory=True) as profile:
            layer = stowage.frozen_linear(1024, 4096, storage, dtype=torch.float32)
        assert max(seen) == 1 << 20 and sum(seen) >= layer.weight.numel()
        rises = [e.self_cpu_memory_usage for e in profile.events() if e.self_cpu_memory_usage > 0]
        assert max(rises) < 1.1 * (layer.weight.numel() if "nf4" not in storage else 1 << 22)


def test_trained_beside_an_adapter() -> None:
    base = stowage.frozen_linear(64, 48)
    a, b = nn.Linear(64, 4, bias=False), nn.Linear(4, 48, bias=False)
    x = torch.randn(5, 64)
    before = [p.clone() for p in base.weight.parts.values()]
    optimizer = torch.optim.AdamW([*base.parameters(), *a.parameters(), *b.parameters()], lr=1e-2)
    losses = []
    for _ in range(5):
        loss = (base(x) + b(a(x))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(torch.equal(p, q) for p, q in zip(before, base.weight.parts.values(), strict=True))

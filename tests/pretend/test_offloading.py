# SPDX-License-Identifier: Apache-2.0
"""Models that compute on a device while their weights rest in memory or on a disk."""

from __future__ import annotations

import copy
import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from forking import in_child
from pretend_device import counted, counters, pinned
from torch import nn
from torch.nn import functional as F

import stowage
from stowage._tiers.device.link import ALIGN, TILE
from stowage._tiers.device.ring import _tiers

DEVICE = torch.device("pretend:0")
X = torch.linspace(-1, 1, 3 * 192).reshape(3, 192)
ROOM = 4 << 20
STORAGES = [None, "int8", "f8_e4m3:row", "nf4", "nf4:nested"]


def made(storage: str | None, layers: int = 6, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layer = [nn.Linear(192, 192) for _ in range(layers)]
    model = nn.Sequential(*layer).eval().to(dtype)
    if storage:
        stowage.stow(model, storage)
    return model


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [layer.weight for layer in model]  # type: ignore[union-attr,misc]


def rest(model: nn.Module) -> int:
    """Bytes of what is fetched."""
    return sum(stowage.nbytes(weight) for weight in weights(model))


def stays(model: nn.Module) -> int:
    return stowage.nbytes(model) - rest(model)


def there(model: nn.Module, x: torch.Tensor = X) -> torch.Tensor:
    """What the model gives when it is on the device whole."""
    with torch.no_grad():
        return copy.deepcopy(model).to(DEVICE)(x.to(DEVICE)).cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("lazy", [True, False])
def test_values_are_those_of_the_model_on_the_device(
    storage: str | None, dtype: torch.dtype, lazy: bool
) -> None:
    model = made(storage, dtype=dtype)
    wanted = there(model, X.to(dtype))
    part = rest(model) // 2
    with counted(lazy=lazy), torch.no_grad():
        stowage.offload(model, device=DEVICE, accelerator=stays(model) + part + 2048)
        assert all(weight.device.type == "cpu" for weight in weights(model))
        for _ in range(3):
            assert torch.equal(model(X.to(dtype)), wanted)
        on_device = model(X.to(DEVICE, dtype))
        assert on_device.device == DEVICE and torch.equal(on_device.cpu(), wanted)
        stowage.onload(model)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("streams", [True, False])
def test_what_crosses_the_link(storage: str | None, streams: bool) -> None:
    """At rest: what does not fit crosses in each pass, and nothing where all fits."""
    model = made(storage)
    size = rest(model)
    x = X.to(DEVICE)
    for room, least, most in ((ROOM, 0, 0), (stays(model) + size // 2 + 2048, size // 2, size)):
        with counted(streams=streams), torch.no_grad():
            stowage.offload(model, device=DEVICE, accelerator=room)
            model(x), model(x)
            before, told = counters().copied_in, stowage.engine_report(model)
            model(x)
            copied = counters().copied_in - before
            assert least <= copied <= most + 6 * 5 * ALIGN  # between the parts of a weight
            once = stowage.engine_report(model).since(told).device
            assert once is not None and once.bytes_copied == copied
            assert once.uses == 6 and once.hits + once.misses + once.late == 6
            assert once.peak <= once.ring <= room
            stowage.onload(model)


@pytest.mark.parametrize("storage", STORAGES)
def test_the_limit_holds(storage: str | None) -> None:
    """All that is on the device beside the work of the same pass is within the limit."""
    model, x = made(storage), X.to(DEVICE)
    whole = copy.deepcopy(model).to(DEVICE)
    with counted(), torch.no_grad():
        held = counters().held
        whole(x)
        work = counters().peak - held
    del whole
    limit = stays(model) + rest(model) // 3 + 2048
    with counted(), torch.no_grad():
        held = counters().held
        stowage.offload(model, device=DEVICE, accelerator=limit)
        assert counters().peak - held <= limit
        for _ in range(2):
            model(x)
        assert counters().peak - held <= limit + work
        del model
        gc.collect()
        assert counters().held == held


def test_a_pass_is_learnt(tmp_path: Path) -> None:
    """The order of use is not the order of the parameters, after one pass nothing is missed."""

    class Backwards(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in reversed(list(self)):
                x = layer(x)
            return x

    model = Backwards(*made("int8"))
    wanted = there(model)
    with counted(), torch.no_grad():
        stowage.offload(model, device=DEVICE, accelerator=stays(model) + rest(model) // 2 + 2048)
        assert torch.equal(model(X), wanted) and torch.equal(model(X), wanted)
        told = stowage.engine_report(model)
        for _ in range(3):
            assert torch.equal(model(X), wanted)
        once = stowage.engine_report(model).since(told).device
        assert once is not None and once.misses == 0 and once.uses == 18
        order = torch.randperm(6, generator=torch.Generator().manual_seed(0)).tolist()
        for i in order * 2:  # a wrong guess is a copy, and no wrong result
            assert torch.equal(model[i](X.to(DEVICE)).cpu(), there(model[i]))


def there_by_rows(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return copy.deepcopy(model).to(DEVICE)(ids.to(DEVICE)).cpu()


@pytest.mark.parametrize("storage", [None, "int8", "nf4"])
def test_embeddings_give_rows(storage: str | None) -> None:
    table = nn.Embedding(4096, 64)
    model = nn.Sequential(table)
    if storage:
        stowage.stow(model, storage)
    ids = torch.tensor([[3, 9], [4095, 0]])
    wanted = there_by_rows(model, ids)
    with counted(), torch.no_grad():
        stowage.offload(model, device=DEVICE, accelerator=0)
        before = counters().copied_in
        assert torch.equal(model(ids), wanted)
        assert counters().copied_in - before == ids.nbytes + wanted.nbytes
        assert torch.equal(model(ids.to(DEVICE)).cpu(), wanted)
        with pytest.raises(stowage.InvalidArgument, match="ids must"):
            model(torch.tensor([4096]))


@pytest.mark.parametrize("storage", [None, "int8"])
def test_gradients(storage: str | None) -> None:
    model = made(storage, 3).requires_grad_(False)
    ours, theirs = (X.clone().requires_grad_() for _ in range(2))
    copy.deepcopy(model).to(DEVICE)(theirs.to(DEVICE)).square().sum().backward()
    with counted():
        limit = stays(model) + rest(model) // 3 + 1024
        stowage.offload(model, device=DEVICE, accelerator=limit)
        for _ in range(2):
            ours.grad = None
            model(ours).square().sum().backward()
            assert ours.grad is not None and theirs.grad is not None
            assert torch.equal(ours.grad, theirs.grad)
        told = stowage.engine_report(model).device
        assert told is not None and told.uses == 12  # backward fetches again


@pytest.mark.parametrize("storage", [None, "int8", "nf4"])
@pytest.mark.parametrize("reads", ["mapped", "direct"])
def test_from_a_disk_through_memory(storage: str | None, reads: str, tmp_path: Path) -> None:
    model = made(storage)
    wanted = there(model)
    largest = max(stowage.nbytes(weight) for weight in weights(model))
    ram = 2 * (largest + (2 << 14))
    limit = stays(model) + 2 * largest + 2048
    with counted(), torch.no_grad():
        stowage.offload(
            model, ram=ram, folder=tmp_path, device=DEVICE, accelerator=limit, reads=reads
        )
        for _ in range(3):
            assert torch.equal(model(X), wanted)
        told = stowage.engine_report(model)
        assert told.device is not None and told.device.bytes_copied > 0
        assert 0 < told.peak <= ram and told.device.peak <= told.device.ring <= limit
        stowage.onload(model)
        assert torch.equal(there(model), wanted)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 128, 192), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([F.linear(x, self.w[e]) for e in (4, 1)])


def test_a_stack_comes_to_a_device_whole(tmp_path: Path) -> None:
    """Through the engine, and not by pages of the mapping."""
    model = Experts()
    stowage.stow(model, rules={"w": "int8:row2"})
    x = torch.randn(3, 192).to(DEVICE)
    size = stowage.nbytes(model)
    with counted(), torch.no_grad():
        stowage.offload(
            model, ram=size + (2 << 14), folder=tmp_path, device=DEVICE, accelerator=size + 2048
        )
        first = model(x).cpu()
        assert torch.equal(model(x).cpu(), first)
        assert stowage.engine_report(model).borrowed == 0
        stowage.onload(model)
        assert torch.allclose(model(x.cpu()), first, atol=1e-4)


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_forked_child_has_a_ring_of_its_own(on_disk: bool, tmp_path: Path) -> None:
    """At a moment when another thread has the tier's lock, and a unit of it."""
    model = made("int8")
    wanted = there(model)
    where: dict[str, Any] = {"folder": tmp_path, "ram": "1MiB"} if on_disk else {}
    with torch.no_grad():
        stowage.offload(model, device=DEVICE, accelerator=stays(model) + 2 * rest(model), **where)
        model(X)
    codes = list(weights(model)[0].parts.values())  # type: ignore[attr-defined]
    tier = next(tier for tier in _tiers if tier.holds(codes[0]))
    taken, over = threading.Event(), threading.Event()

    def hold() -> None:
        with tier.lend(codes), tier._lock:
            taken.set()
            over.wait()

    def works() -> bool:
        with torch.no_grad():
            return torch.equal(model(X), wanted)

    holder = threading.Thread(target=hold)
    holder.start()
    taken.wait()
    try:
        for _ in range(2):
            in_child(works)
    finally:
        over.set()
        holder.join()
    assert works()


@pytest.mark.parametrize("share", [0, 0.4, 1])
def test_no_more_is_pinned_than_was_asked_for(share: float) -> None:
    model = made("int8")
    most = int(share * sum(stowage.nbytes(w) for w in weights(model)))
    with counted():
        before, _ = pinned()
        stowage.offload(model, device=DEVICE, accelerator=ROOM, pin=most)
        weights_pinned = pinned()[0] - before
        assert weights_pinned <= most and (weights_pinned > 0) == (share > 0)
        for _ in range(3):
            model(X)
        assert pinned()[1] - before <= most + 2 * TILE
        stowage.onload(model)
        assert pinned()[0] - before <= 2 * TILE


def test_what_is_fetched_is_pinned_behind_a_layer_that_stays() -> None:
    model = made("int8")
    with counted():
        before, _ = pinned()
        there = {"0": DEVICE}
        stowage.offload(model, device=DEVICE, accelerator=ROOM, pin=ROOM, device_map=there)
        assert pinned()[0] - before >= sum(stowage.nbytes(w) for w in weights(model)[1:])
        stowage.onload(model)


@pytest.mark.parametrize("storage", [None, "int8"])
def test_onload_undoes_all(storage: str | None) -> None:
    model = made(storage)
    model.register_buffer("scale", torch.ones(3))
    before = {name: type(t) for name, t in model.state_dict(keep_vars=True).items()}
    values = {name: t.clone() for name, t in model.state_dict().items()}
    wanted = model(X)
    bias = model[0].bias
    with counted():
        held = counters().held
        stowage.offload(model, device=DEVICE, accelerator=ROOM, pin=ROOM)
        assert model[0].bias is bias and bias.device == DEVICE and model.scale.device == DEVICE
        stowage.onload(model)
        assert counters().held == held
    assert {name: type(t) for name, t in model.state_dict(keep_vars=True).items()} == before
    for name, tensor in model.state_dict().items():
        assert tensor.device.type == "cpu" and torch.equal(tensor, values[name])
    parts = [p for w in weights(model) for p in getattr(w, "parts", {"": w}).values()]
    assert not any(part.is_pinned() for part in parts)
    assert not model._forward_pre_hooks and not model._forward_hooks
    assert torch.equal(model(X), wanted)


@pytest.mark.parametrize("storage", [None, "int8"])
def test_checkpointing(storage: str | None) -> None:
    """Backward runs forward again."""
    model = made(storage, 3).requires_grad_(False)
    theirs = X.to(DEVICE).requires_grad_()
    copy.deepcopy(model).to(DEVICE)(theirs).square().sum().backward()
    with counted():
        limit = stays(model) + rest(model) // 3 + 1024
        stowage.offload(model, device=DEVICE, accelerator=limit)
        ours = X.to(DEVICE).requires_grad_()
        run = torch.utils.checkpoint.checkpoint(model, ours, use_reentrant=False)
        run.square().sum().backward()
        assert ours.grad is not None and theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)

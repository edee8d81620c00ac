# SPDX-License-Identifier: Apache-2.0
"""Offloaded blocks in compiled graphs, in backward order, and in exceptions half way."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.utils.checkpoint import checkpoint

import stowage

BLOCKS, WIDTH = 24, 160


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x)))) / 8


def stack(storage: str | None, folder: Path | None = None, **given: object) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    if storage:
        stowage.stow(model, storage)
    if folder is not None:
        ram = 6 * (2 * WIDTH * WIDTH * 4 + (1 << 14))
        stowage.offload(model, ram=ram, folder=folder, **given)  # type: ignore[arg-type]
    return model


X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("storage", [None, "nf4"])
def test_one_compile_for_24_blocks(storage: str | None, tmp_path: Path) -> None:
    model, whole = stack(storage, tmp_path).eval(), stack(storage).eval()
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    for block in model:
        block.compile(backend=counter, fullgraph=True)
    with torch.inference_mode():
        x = X.clone()  # an inference tensor, as all that the blocks see
        for _ in range(2):
            assert torch.allclose(model(x), whole(x), rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1
    report = stowage.engine_report(model)
    assert report.acquired == 2 * 2 * BLOCKS and report.borrowed == 0


@pytest.mark.slow
def test_inductor_trains_through_offloaded_blocks(tmp_path: Path) -> None:
    torch._dynamo.reset()
    grads = []
    for model in (stack("int8", tmp_path), stack("int8")):
        for block in model:
            block.compile(fullgraph=True)
        x = X.clone().requires_grad_()
        model(x).square().sum().backward()
        grads.append([x.grad, model[0].norm.weight.grad])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_backward_order_is_learnt(reentrant: bool | None, tmp_path: Path) -> None:
    """Backward uses the weights from the last one to the first; from the second step on most are
    prefetched. With checkpoints a block's weights come in the order of its forward and then in that
    of its backward, and what comes next is not told by the two uses before it alone."""
    model, whole = stack("int8", tmp_path, reads="buffered"), stack("int8")

    def step(blocks: nn.Sequential) -> torch.Tensor:
        x = y = X.clone().requires_grad_()
        for block in blocks:
            y = block(y) if reentrant is None else checkpoint(block, y, use_reentrant=reentrant)
        y.square().sum().backward()
        assert x.grad is not None
        return x.grad

    wanted = step(whole)
    for _ in range(3):
        assert torch.equal(step(model), wanted)
    before = stowage.engine_report(model)
    assert torch.equal(step(model), wanted)
    once = stowage.engine_report(model).since(before)
    assert once.acquired >= 4 * BLOCKS and once.borrowed == 0
    assert once.misses <= once.acquired / (4 if reentrant is None else 3), str(once)


def test_an_exception_half_way_leases_nothing(tmp_path: Path) -> None:
    model, whole = stack("int8", tmp_path, workers=0), stack("int8")

    def fails(module: nn.Module, args: object) -> None:
        raise KeyboardInterrupt

    wanted = whole(X)
    for at in (0, 11, 23):
        hook = model[at].down.register_forward_pre_hook(fails)
        with pytest.raises(KeyboardInterrupt):
            model(X)
        hook.remove()
        x = X.clone().requires_grad_()
        hook = model[at].norm.register_full_backward_hook(lambda *_: fails(model, ()))
        with pytest.raises(KeyboardInterrupt):
            model(x).sum().backward()
        hook.remove()
    assert torch.equal(model(X), wanted)
    report = stowage.engine_report(model)
    assert report.borrowed == 0  # every use found room: nothing was in use when it came


def test_threads_forward_and_back(tmp_path: Path) -> None:
    model, whole = stack("int8", tmp_path, reads="buffered"), stack("int8")

    def gradient(blocks: nn.Sequential, scale: float) -> torch.Tensor:
        x = (X * scale).requires_grad_()
        (grad,) = torch.autograd.grad(blocks(x).square().sum(), x)
        return grad

    wanted = [gradient(whole, 1.0 + i) for i in range(2)]
    right: list[bool] = []

    def run(i: int) -> None:
        right.extend(torch.equal(gradient(model, 1.0 + i), wanted[i]) for _ in range(5))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(right) == 10 and all(right)

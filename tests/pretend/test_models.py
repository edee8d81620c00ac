# SPDX-License-Identifier: Apache-2.0
"""What users do with a model whose weights are fetched to a device: graphs, adapters, threads,
writes, copies, files."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from pretend_device import counted, counters
from torch import nn

import stowage

DEVICE = torch.device("pretend:0")
X = torch.linspace(-1, 1, 3 * 192).reshape(3, 192)
NIGHTLY = pytest.mark.nightly
KINDS = pytest.mark.parametrize(
    "storage", [pytest.param(None, marks=NIGHTLY), "int8", pytest.param("nf4", marks=NIGHTLY)]
)


def made(storage: str | None, layers: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(192, 192) for _ in range(layers))).eval()
    if storage:
        stowage.stow(model, storage)
    return model.requires_grad_(False)


def there(model: nn.Module, x: torch.Tensor = X) -> torch.Tensor:
    with torch.no_grad():
        return copy.deepcopy(model).to(DEVICE)(x.to(DEVICE)).cpu()


def offloaded(storage: str | None, **more: Any) -> nn.Sequential:
    """With room for about two weights."""
    model = made(storage)
    weight = model[0].weight
    bias = sum(layer.bias.nbytes for layer in model)  # type: ignore[misc,union-attr]
    limit = int(bias + 2.2 * stowage.nbytes(weight) + 1024)  # type: ignore[arg-type]
    stowage.offload(model, **{"device": DEVICE, "accelerator": limit, **more})
    return model


@KINDS
def test_one_graph(storage: str | None) -> None:
    wanted = there(made(storage))
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    with counted():
        model = offloaded(storage)
        run = torch.compile(model, backend=backend, fullgraph=True)
        with torch.no_grad():
            for _ in range(2):
                assert torch.equal(run(X), wanted)
        assert len(graphs) == 1
        ours, theirs = (X.clone().requires_grad_() for _ in range(2))
        torch.compile(model, backend="aot_eager", fullgraph=True)(ours).sum().backward()
        model(theirs).sum().backward()
        assert ours.grad is not None and theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)
    torch._dynamo.reset()


@KINDS
@pytest.mark.parametrize("lazy", [True, False])
def test_threads(storage: str | None, lazy: bool) -> None:
    wanted, wrong = there(made(storage)), []
    with counted(lazy=lazy):
        model = offloaded(storage)

        def run() -> None:
            with torch.inference_mode():
                wrong.extend(i for i in range(10) if not torch.equal(model(X), wanted))

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not wrong and not any(thread.is_alive() for thread in threads)


@KINDS
def test_a_failed_forward_leaves_nothing(storage: str | None) -> None:
    wanted = there(made(storage))
    with counted(), torch.no_grad():
        model = offloaded(storage)
        for _ in range(20):
            with pytest.raises((RuntimeError, ValueError)):
                model(torch.ones(3, 191))
        assert torch.equal(model(X), wanted)
        assert model(X.to(DEVICE)).device == DEVICE
        held = counters().held
        for _ in range(5):
            with pytest.raises((RuntimeError, ValueError)):
                model[2](torch.ones(3, 191, device=DEVICE))
        assert counters().held == held


@KINDS
def test_writes_are_seen(storage: str | None) -> None:
    with counted(), torch.no_grad():
        model = offloaded(storage)
        before = model(X)
        model[1].weight.mul_(2)
        twin = copy.deepcopy(model)  # shares the ring
        assert torch.equal(twin(X), model(X)) and not torch.equal(model(X), before)
        model.load_state_dict(made(None, 4).state_dict())
        wanted = model(X)
        assert not torch.equal(wanted, twin(X))
        stowage.onload(model)
        assert torch.equal(there(model), wanted)
        assert twin(X).shape == wanted.shape  # the other has its own
        stowage.onload(twin)


@KINDS
def test_what_ends_with_the_model(storage: str | None) -> None:
    with counted(), torch.no_grad():
        held = counters().held
        model = offloaded(storage)
        model(X)
        assert counters().held > held
        del model
        gc.collect()
        assert counters().held == held


@KINDS
def test_files_and_copies(storage: str | None, tmp_path: Path) -> None:
    wanted = made(storage)(X)
    with counted(), torch.no_grad():
        model = offloaded(storage)
        model(X)
        stowage.save(model, tmp_path / "saved")
        torch.save(model.state_dict(), tmp_path / "state")
        with pytest.raises(stowage.Unsupported, match="cannot be pickled"):
            pickle.dumps(model)
    other = made(storage)
    for value in other.state_dict().values():
        value.zero_()
    stowage.load(other, tmp_path / "saved")
    assert torch.equal(other(X), wanted)
    state = torch.load(tmp_path / "state", weights_only=False, map_location="cpu")
    assert {t.device.type for t in state.values()} == {"cpu"}
    third = made(storage)
    third.load_state_dict(state)
    assert torch.equal(third(X), wanted)


@pytest.mark.parametrize("storage", ["int8", pytest.param("nf4", marks=NIGHTLY)])
@pytest.mark.parametrize("before", [True, False])
def test_adapters(storage: str, before: bool) -> None:
    peft = pytest.importorskip("peft")

    def adapted(model: nn.Module) -> Any:
        torch.manual_seed(1)
        config = peft.LoraConfig(target_modules=["0", "3"], init_lora_weights=False)
        return peft.get_peft_model(model, config)

    theirs = adapted(made(storage)).to(DEVICE)
    theirs(X.to(DEVICE)).square().sum().backward()
    with counted():
        if before:
            ours = adapted(made(storage))
            stowage.offload(ours, device=DEVICE, accelerator="1MiB")
        else:
            ours = adapted(offloaded(storage))
        steps = torch.optim.SGD([p for p in ours.parameters() if p.requires_grad], lr=0.1)
        ours(X).square().sum().backward()
        wanted = dict(theirs.named_parameters())
        trained = {name: p for name, p in ours.named_parameters() if p.requires_grad}
        assert len(trained) == 4
        for name, parameter in trained.items():
            assert parameter.device == DEVICE
            assert torch.equal(parameter.grad, wanted[name].grad)
        values = {name: p.detach().clone() for name, p in trained.items()}
        steps.step()
        assert all(not torch.equal(p, values[name]) for name, p in trained.items())


@KINDS
def test_gradients_of_weights_are_where_they_are(storage: str | None) -> None:
    model = made(storage)
    for layer in model:  # of one that rests, nn.Parameter is the way to look at its gradient
        layer.weight = nn.Parameter(layer.weight.detach())  # type: ignore[operator,union-attr]
    wanted = copy.deepcopy(model).to(DEVICE)
    wanted(X.to(DEVICE)).square().sum().backward()
    with counted():
        stowage.offload(model, device=DEVICE, accelerator="1MiB")
        model(X).square().sum().backward()
    for ours, theirs in zip(model.parameters(), wanted.parameters(), strict=True):
        if theirs.grad is not None:
            assert ours.grad is not None and ours.grad.device == ours.device
            assert torch.equal(ours.grad.cpu(), theirs.grad.cpu())


OPERATORS = {
    "matmul": lambda x, w: x @ w,
    "transposed": lambda x, w: x @ w.t(),
    "from the left": lambda x, w: w @ x.t(),
    "add": lambda x, w: x[:1] + w,
    "einsum": lambda x, w: torch.einsum("ab,cb->ac", x, w),
    "where": lambda x, w: torch.where(x[0] > 0, w, x[0]),
    "row": lambda x, w: w[0] * x,
    "index": lambda x, w: w[torch.tensor([1, 0], device=x.device)],
    "into": lambda x, w: torch.empty(192, 192, device=x.device).copy_(w),
}


@NIGHTLY
@pytest.mark.parametrize("name", OPERATORS)
@KINDS
def test_operators_that_mix(storage: str | None, name: str) -> None:
    x = X.to(DEVICE)
    with torch.no_grad():
        wanted = OPERATORS[name](x, made(storage)[0].weight.to(DEVICE))
        with counted():
            weight = offloaded(storage)[0].weight
            assert weight.device.type == "cpu" and weight.sum().device.type == "cpu"
            if (name, storage) == ("row", None):
                return
            model = offloaded(storage)
            got = OPERATORS[name](x, model[0].weight)
            assert got.device == DEVICE and torch.equal(got, wanted)


@KINDS
def test_weights_that_nobody_fetches(storage: str | None) -> None:
    model = made(storage)
    with pytest.raises((RuntimeError, stowage.InvalidArgument), match=r"on cpu|same device"):
        model[0](X.to(DEVICE))
    with counted():
        other = offloaded(storage)
        with pytest.raises((RuntimeError, stowage.InvalidArgument), match=r"on cpu|same device"):
            other[0](X.to("pretend:1"))


@pytest.mark.parametrize("storage", [pytest.param(None, marks=NIGHTLY), "int8"])
@pytest.mark.parametrize("width", [64, 512])
def test_convolutions(storage: str | None, width: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(64, width, 3, padding=1), nn.Conv2d(width, 64, 3)).eval()
    model.requires_grad_(False)
    if storage:
        stowage.stow(model, storage)
    x = torch.linspace(-1, 1, 64 * 64).reshape(1, 64, 8, 8)
    theirs = x.to(DEVICE).requires_grad_()
    wanted = copy.deepcopy(model).to(DEVICE)(theirs)
    wanted.square().sum().backward()
    with counted():
        stowage.offload(model, device=DEVICE, accelerator="8MiB")
        ours = x.clone().requires_grad_()
        got = model(ours)
        assert torch.equal(got, wanted.cpu())
        got.square().sum().backward()
        assert ours.grad is not None and theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad.cpu())


def test_experts_come_one_by_one() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 64, 96), requires_grad=False)

        def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            return stowage.grouped_linear(x, self.weight, ends)

    model = Experts()
    stowage.stow(model, rules={"weight": "int8:row2"})
    x, ends = torch.randn(6, 96), torch.tensor([0, 0, 2, 2, 2, 6, 6, 6])
    with torch.no_grad():
        wanted = copy.deepcopy(model).to(DEVICE)(x.to(DEVICE), ends.to(DEVICE)).cpu()
        with counted():
            stowage.offload(model, device=DEVICE, accelerator="1MiB")
            assert torch.equal(model(x, ends), wanted)
            told = stowage.engine_report(model).device
            assert told is not None and told.bytes_copied < stowage.nbytes(model) // 2

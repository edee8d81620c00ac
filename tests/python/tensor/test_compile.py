# SPDX-License-Identifier: Apache-2.0
"""torch.compile and torch.export of models with stowed weights: graphs and our ops are counted.

A compile that silently did nothing passes every numeric test, so each case says how many graphs
there are and which of our operators they hold. aot_eager for breadth, Inductor end to end once.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F

import stowage


def stow(module: nn.Module, storage: str = "int8") -> nn.Module:
    for part in module.modules():
        for name, p in list(part.named_parameters(recurse=False)):
            if p.dim() > 1:
                setattr(part, name, nn.Parameter(stowage.quantize(p.detach(), storage), False))
    return module


class Spy:
    """A backend that runs graphs as they are and notes our operators in each."""

    def __init__(self) -> None:
        self.graphs: dict[str, list[Counter[str]]] = {"forward": [], "backward": []}

    def note(self, kind: str) -> Callable[..., Any]:
        def compiler(module: torch.fx.GraphModule, inputs: Any) -> Any:
            names = (str(node.target) for node in module.graph.nodes)
            ours = (n.split(".")[1] for n in names if n.startswith("stowage."))
            self.graphs[kind].append(Counter(ours))
            return torch._functorch.aot_autograd.make_boxed_func(module.forward)

        return compiler

    def __call__(self, module: torch.fx.GraphModule, inputs: Any) -> Any:
        backend = aot_autograd(fw_compiler=self.note("forward"), bw_compiler=self.note("backward"))
        return backend(module, inputs)


def compare(model: nn.Module, compiled: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Values and gradients of the input and of every trainable parameter."""
    results = []
    for run in (model, compiled):
        v = x.detach().clone().requires_grad_() if x.is_floating_point() else x
        y = run(v)
        y.float().square().mean().backward()
        grads = [p.grad for p in (v, *model.parameters()) if p.grad is not None]
        results.append([y, *grads])
        model.zero_grad()
    assert len(results[0]) == len(results[1]) > 1
    for wanted, got in zip(*results, strict=True):
        assert got.dtype == wanted.dtype and torch.allclose(got, wanted, rtol=1e-3, atol=1e-4)


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        w, bias = self.inner.weight, self.inner.bias
        return (
            x @ w.t() + torch.addmm(bias, x, w) + torch.cat([F.linear(x, c) for c in w.chunk(2)], 1)
        )


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 64)
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.table(ids) * self.scale, self.table.weight)


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        w = self.inner.weight
        return self.inner(x.to(w.dtype)) * w.norm() + w[0] + w.float().sum()


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x).float()


def rows(*counts: int) -> list[Tensor]:
    return [torch.randn(n, 64) for n in counts]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))


Case = tuple[Callable[[], nn.Module], list[Tensor], dict[str, int], dict[str, int]]
CASES: dict[str, Case] = {
    "mlp": (mlp, rows(4, 7, 9), {"linear": 2}, {"linear_grad_input": 2}),
    "products": (
        Products,
        rows(4, 7),
        {"linear": 3, "linear_grad_input": 1},
        {"linear_grad_input": 3, "linear": 1},
    ),
    "tied": (
        Tied,
        [torch.randint(32, (n, 5)) for n in (3, 6)],
        {"linear": 1, "embedding": 1},
        {"linear_grad_input": 1},
    ),
    "autocast": (Autocast, rows(4, 7), {"linear": 2}, {"linear_grad_input": 2}),
    "reads": (
        Reads,
        rows(4, 7),
        {"linear": 1, "dequantize": 2, "embedding": 1},
        {"linear_grad_input": 1},
    ),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 4, 3)),
        [torch.randn(n, 3, 8, 8) for n in (2, 3)],
        {"dequantize": 2},
        {"dequantize": 2},
    ),
}


@pytest.mark.parametrize("storage", ["int8", "nf4:block32:nested"])
@pytest.mark.parametrize("case", CASES)
def test_one_graph_for_all_batch_sizes(case: str, storage: str) -> None:
    if storage.endswith("nested") and case == "products":
        return  # such chunks do not stay stowed
    make, inputs, forward, backward = CASES[case]
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, spy = stow(make(), storage), Spy()
    compiled = torch.compile(model, backend=spy, fullgraph=True, dynamic=True)
    for x in inputs:
        compare(model, compiled, x)
    assert spy.graphs == {"forward": [forward], "backward": [backward]}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Callable[[], Any]) -> None:
    torch._dynamo.reset()
    model, spy = stow(nn.Sequential(mlp(), Products()), "nf4"), Spy()
    compiled = torch.compile(model, backend=spy, fullgraph=True, dynamic=True)
    with mode():
        for x in rows(4, 7, 9):
            assert torch.allclose(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    assert spy.graphs["forward"] == [Counter(linear=5, linear_grad_input=1)]


def test_equal_layers_compile_once_and_writes_need_no_other() -> None:
    torch._dynamo.reset()
    layers, spy = [stow(nn.Linear(64, 64)) for _ in range(6)], Spy()
    for layer in layers:
        layer.compile(backend=spy, fullgraph=True, dynamic=True)
    for n in (4, 7, 9):
        x = torch.randn(n, 64)
        for layer in layers:
            with torch.no_grad():
                layer.weight[2].neg_()  # type: ignore[index]
            wanted = F.linear(x, layer.weight.dequantize(), layer.bias)  # type: ignore[operator]
            assert torch.allclose(layer(x), wanted, atol=1e-5)
    assert len(spy.graphs["forward"]) == 1


def test_a_dtype_moves_under_live_compiled_code() -> None:
    torch._dynamo.reset()
    model = stow(mlp())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(torch.randn(3, 64))
    model.to(torch.bfloat16)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    assert torch.allclose(compiled(x), model(x), rtol=1e-2, atol=1e-2)


def test_a_write_in_a_graph_breaks_it_or_is_refused() -> None:
    def write(w: Tensor, x: Tensor) -> Tensor:
        w[0].fill_(0.5)
        return F.linear(x, w)

    w = stow(nn.Linear(64, 8), "nf4").weight
    before, x = w.dequantize(), torch.randn(3, 64)  # type: ignore[operator]
    with torch.no_grad():
        torch._dynamo.reset()
        with pytest.raises(RuntimeError, match="inside a compiled graph"):
            torch.compile(write, backend="aot_eager", fullgraph=True)(w, x)
        assert torch.equal(w.dequantize(), before)  # type: ignore[operator]
        torch._dynamo.reset()
        y = torch.compile(write, backend="aot_eager")(w, x)
    assert torch.equal(w.dequantize()[0], torch.full((64,), 0.5))  # type: ignore[operator]
    assert torch.allclose(y, F.linear(x, w), atol=1e-5)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool, tmp_path: Path) -> None:
    torch._dynamo.reset()
    model, x = stow(nn.Sequential(mlp(), Products()), "nf4").eval(), torch.randn(5, 64)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(model, (x,), dynamic_shapes=[{0: batch}], strict=strict)
    assert type(program.state_dict["0.0.weight"]) is stowage.StowedTensor
    program = program.run_decompositions()
    names = [str(node.target) for node in program.graph.nodes]
    assert sum(name == "stowage.linear.default" for name in names) >= 2
    torch.export.save(program, tmp_path / "model.pt2")
    for loaded in (program, torch.export.load(tmp_path / "model.pt2")):
        for n in (5, 9):
            x = torch.randn(n, 64)
            assert torch.allclose(loaded.module()(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_inductor_end_to_end() -> None:
    torch._dynamo.reset()
    model = stow(nn.Sequential(mlp(), Products()), "nf4")
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for x in rows(4, 7, 9):
        compare(model, compiled, x)
    with torch.inference_mode():
        assert torch.allclose(compiled(x), model(x), rtol=1e-4, atol=1e-4)

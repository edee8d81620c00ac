# SPDX-License-Identifier: Apache-2.0
"""A stack of 24 equal blocks under torch.compile and torch.export: how often it is compiled, that
our ops are in the graphs, that nothing in an op waits for the device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import stowage
from stowage._ops import library

# Sizes that are equal in the first call would be taken for one size.
SHAPES = [(b, t) for b in (2, 3) for t in (5, 7, 11, 16, 40)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def stack(storage: str, count: int = 24, exact: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(count)))
    stowage.stow(model, storage, exact=exact)
    return model


def our_nodes(counter: CompileCounterWithBackend) -> int:
    """Calls of the stowed linear in the graph that Dynamo made, where it is still torch's."""
    nodes = [n for n in counter.graphs[-1].graph.nodes if n.op == "call_function"]
    return sum("linear" in str(n.target) or "stowage" in str(n.target) for n in nodes)


def compiles_once(counter: CompileCounterWithBackend, calls: list[Callable[[], Any]]) -> bool:
    """Whether only the first call reaches the backend. torch 2.13 hands it a graph with dynamic
    sizes twice, of dense models too."""
    calls[0]()
    first = counter.frame_count
    for call in calls[1:]:
        call()
    return 1 <= first <= 2 and counter.frame_count == first


def counted() -> CompileCounterWithBackend:
    torch._dynamo.reset()
    return CompileCounterWithBackend("aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("mode", [torch.enable_grad])
def test_ten_shapes_are_one_graph(mode: Callable[[], Any]) -> None:
    counter = counted()
    model = stack("f8_e4m3:row", count=2)
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)

    def run(shape: tuple[int, int]) -> None:
        x = torch.randn(*shape, 32)
        with mode():
            assert torch.allclose(compiled(x), model(x), rtol=1e-4, atol=1e-4)

    assert compiles_once(counter, [partial(run, shape) for shape in SHAPES])
    assert our_nodes(counter) == 4


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["nf4"])
def test_blocks_compiled_one_by_one_are_compiled_once(storage: str) -> None:
    counter = counted()
    model = stack(storage)
    plain = copy.deepcopy(model)
    for block in model:
        block.compile(backend=counter, fullgraph=True, dynamic=True)

    def run(block: int, shape: tuple[int, int]) -> None:
        x = torch.randn(*shape, 32)
        assert torch.allclose(model[block](x), plain[block](x), rtol=1e-3, atol=1e-3)

    calls = [partial(run, block, shape) for shape in SHAPES[:4] for block in range(24)]
    assert compiles_once(counter, calls)
    assert our_nodes(counter) == 2


@pytest.mark.nightly
@pytest.mark.parametrize("storage", ["f8_e4m3", "int8:block32", "nf4:block64:nested", "bf16"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_the_whole_stack_is_one_graph(storage: str, mode: Callable[[], Any]) -> None:
    counter = counted()
    model = stack(storage)
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)

    def run(shape: tuple[int, int]) -> None:
        x = torch.randn(*shape, 32)
        with mode():
            assert torch.allclose(compiled(x), model(x), rtol=1e-3, atol=1e-3)

    assert compiles_once(counter, [partial(run, shape) for shape in SHAPES])
    assert our_nodes(counter) == 48


@pytest.mark.parametrize("storage", ["f8_e4m3", "int8:block32", "nf4:block64:nested"])
@pytest.mark.parametrize("exact", [False, True])
def test_the_op_alone_is_bit_equal_compiled(storage: str, exact: bool) -> None:
    counter = counted()
    layer = nn.Linear(72, 40)
    stowage.stow(layer, storage, exact=exact)
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)

    def run(rows: int) -> None:
        x = torch.randn(rows, 72)
        with torch.inference_mode():
            assert torch.equal(compiled(x), layer(x))

    assert compiles_once(counter, [partial(run, rows) for rows in (2, 9, 33)])
    assert our_nodes(counter) == 1


def test_an_exported_stack_equals_eager() -> None:
    torch._dynamo.reset()
    model, x = stack("nf4", count=4, exact=True).eval(), torch.randn(3, 5, 32)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(model, (x,), dynamic_shapes=[{0: batch}])
    lowered = program.run_decompositions()
    names = [str(node.target) for node in lowered.graph.nodes]
    assert sum(name == "stowage.linear.default" for name in names) == 8
    for batch_size in (3, 9):
        x = torch.randn(batch_size, 5, 32)
        with torch.no_grad():
            wanted = model(x)
            for each in (program, lowered):
                assert torch.equal(each.module()(x), wanted)


# --- no host sync ---------------------------------------------------------------------------------


class NoHostSync(TorchDispatchMode):
    """Fails where a value of a tensor is copied to the host, as a CUDA graph would."""

    seen = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        assert func not in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
        )
        self.seen += str(func).startswith("stowage.")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "storage", ["f8_e4m3", "f8_e4m3:tensor", "int8:block32", "nf4:block64:nested"]
)
def test_ops_copy_no_value_to_the_host(storage: str) -> None:
    layer = nn.Linear(72, 40)
    table = nn.Embedding(20, 72)
    for each in (layer, table):
        stowage.stow(each, storage)
    ids = torch.arange(6)
    with NoHostSync() as watch:
        x = table(ids).requires_grad_()
        y = layer(x) @ layer.weight + torch.einsum("ij,kj->ik", layer(x), layer.weight.t()).sum()
        y.sum().backward()
    assert watch.seen >= 5
    weight = layer.weight
    with FakeTensorMode() as mode:  # has no values to copy
        parts = [mode.from_tensor(p) for p in weight.parts.values()]
        x, key = torch.empty(5, 72), weight._storage.key
        assert library.linear(x, parts[0], parts[1:], key, 40, None).shape == (5, 40)
        g = torch.empty(5, 40)
        assert library.linear_grad_input(g, parts[0], parts[1:], key, 72).shape == (5, 72)
        dense = library.dequantize(parts[0], parts[1:], key, (40, 72), torch.float32)
        rows = library.embedding(torch.empty(3, dtype=torch.int64), parts[0], parts[1:], key,
                             (40, 72), torch.float32)  # fmt: skip
        assert dense.shape == (40, 72) and rows.shape == (3, 72)

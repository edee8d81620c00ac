# SPDX-License-Identifier: Apache-2.0
"""torch.compile, torch.export and fake tensors: the ops stay in the graph, sizes stay symbolic."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from stowage._ops import library
from stowage._ops.storage import Storage
from stowage._tensor import autograd

SAMPLED = ("f8_e4m3", "int8:row", "nf4", "nf4:block64:nested")
ROWS, COLUMNS = 24, 64


@pytest.fixture(params=SAMPLED)
def kind(request: pytest.FixtureRequest) -> Storage:
    return Storage(request.param)


class Layer(torch.nn.Module):
    def __init__(self, kind: Storage, device: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        parts = library.quantize(
            torch.randn(ROWS, COLUMNS, generator=generator).to(device), kind.key
        )
        self.key, self.count = kind.key, len(parts)
        for i, part in enumerate(parts):
            self.register_buffer(f"part{i}", part)
        self.bias = torch.nn.Parameter(torch.randn(ROWS, device=device))

    def parts(self) -> list[Tensor]:
        return [getattr(self, f"part{i}") for i in range(self.count)]

    def forward(self, x: Tensor) -> Tensor:
        codes, *scales = self.parts()
        return autograd.linear(x, codes, scales, self.key, ROWS, self.bias).relu()


class Counter:
    """A backend that counts compilations and the ops of ours in each graph."""

    def __init__(self) -> None:
        self.compiles, self.ours = 0, []

    def __call__(self, module, inputs):
        def count(graph_module, _):
            names = [str(n.target) for n in graph_module.graph.nodes if n.op == "call_function"]
            self.ours.append([n for n in names if n.startswith("stowage")])
            return graph_module

        self.compiles += 1
        return torch._dynamo.backends.common.aot_autograd(fw_compiler=count, bw_compiler=count)(
            module, inputs
        )


@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference"])
def test_one_compile_for_all_batch_sizes(kind, mode, device) -> None:
    torch._dynamo.reset()
    layer, counter = Layer(kind, device), Counter()
    compiled = torch.compile(layer, backend=counter, dynamic=True, fullgraph=True)
    contexts = {"grad": torch.enable_grad, "no_grad": torch.no_grad}
    with contexts.get(mode, torch.inference_mode)():
        for batch in (3, 7, 40):
            x = torch.randn(2, batch, COLUMNS, device=device, requires_grad=mode == "grad")
            ours, eager = compiled(x), layer(x)
            torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)
            if mode == "grad":
                wanted = (x, layer.bias)
                a, b = (torch.autograd.grad(y.square().sum(), wanted) for y in (ours, eager))
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert counter.compiles == 1
    forward = ["stowage.linear.default"]
    backward = [["stowage.linear_grad_input.default"]] if mode == "grad" else []
    assert counter.ours == [forward, *backward]


def test_equal_layers_share_one_compile(device) -> None:
    torch._dynamo.reset()
    kind, counter = Storage("int8:row"), Counter()
    layers = [Layer(kind, device) for _ in range(6)]
    for layer in layers:
        layer.compile(backend=counter, dynamic=True, fullgraph=True)
    for batch in (3, 5):
        for layer in layers:
            layer(torch.randn(batch, COLUMNS, device=device))
    assert counter.compiles == 1


@pytest.mark.slow
def test_inductor_end_to_end(device) -> None:
    torch._dynamo.reset()
    layer = Layer(Storage("int8:row"), device)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    x = torch.randn(COLUMNS, 5, device=device).t()  # not contiguous: exact strides are kept
    torch.testing.assert_close(compiled(x), layer(x), rtol=1e-5, atol=1e-5)


def test_embedding_and_dequantize_compile(kind, device) -> None:
    torch._dynamo.reset()
    layer, counter = Layer(kind, device), Counter()
    codes, *scales = layer.parts()

    def both(ids: Tensor) -> Tensor:
        shape = (ROWS, COLUMNS)
        rows = autograd.embedding(ids, codes, scales, kind.key, shape, torch.float32)
        return rows + library.dequantize(codes, scales, kind.key, shape, torch.float32).sum()

    compiled = torch.compile(both, backend=counter, dynamic=True, fullgraph=True)
    for count in (3, 9):
        ids = torch.arange(count, device=device)
        torch.testing.assert_close(compiled(ids), both(ids))
    assert counter.compiles == 1
    assert counter.ours == [["stowage.embedding.default", "stowage.dequantize.default"]]


@pytest.mark.parametrize("strict", [False, True])
def test_export(kind, strict, device) -> None:
    layer = Layer(kind, device).requires_grad_(False)
    batch = {"x": {0: torch.export.Dim("batch")}}
    with torch.no_grad():
        x = torch.randn(4, COLUMNS, device=device)
        program = torch.export.export(layer, (x,), dynamic_shapes=batch, strict=strict)
        targets = [str(n.target) for n in program.graph.nodes]
        assert targets.count("stowage.linear.default") == 1
        for size in (4, 9):
            x = torch.randn(size, COLUMNS, device=device)
            torch.testing.assert_close(program.module()(x), layer(x))


# --- fakes ---------------------------------------------------------------------------------------


def test_fakes_give_what_the_ops_give(storage, device) -> None:
    kind = Storage(storage)
    with FakeTensorMode():
        w = torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16, device=device)
        codes, *scales = library.quantize(w, kind.key)
        x = torch.empty(2, 5, COLUMNS, dtype=torch.bfloat16, device=device)
        y = library.linear(x, codes, scales, kind.key, ROWS, None)
        gx = library.linear_grad_input(y, codes, scales, kind.key, COLUMNS)
        ids = torch.empty(3, 2, dtype=torch.int64, device=device)
        shape = (ROWS, COLUMNS)
        rows = library.embedding(ids, codes, scales, kind.key, shape, torch.float16)
        back = library.dequantize(codes, scales, kind.key, shape, torch.float64)
        loss = library.measure(w, codes, scales, kind.key)
    assert (y.shape, gx.shape, y.dtype) == ((2, 5, ROWS), x.shape, torch.bfloat16)
    assert (rows.shape, rows.dtype) == ((3, 2, COLUMNS), torch.float16)
    assert (back.shape, back.dtype, loss.shape) == (shape, torch.float64, (8,))
    real = library.quantize(torch.randn(ROWS, COLUMNS, device=device), kind.key)
    found = [(p.shape, p.dtype, p.device.type) for p in (codes, *scales)]
    assert found == [(p.shape, p.dtype, p.device.type) for p in real]


def test_meta_tensors(kind) -> None:
    codes, *scales = library.quantize(torch.empty(ROWS, COLUMNS, device="meta"), kind.key)
    y = library.linear(torch.empty(3, COLUMNS, device="meta"), codes, scales, kind.key, ROWS, None)
    assert (y.device.type, y.shape) == ("meta", (3, ROWS))


def test_fakes_check_as_the_ops_do(device) -> None:
    kind = Storage("int8:row")
    codes, scale = library.quantize(torch.randn(ROWS, COLUMNS, device=device), kind.key)
    wrong = (torch.empty(3, COLUMNS + 1, device=device), codes, [scale], kind.key, ROWS, None)
    with pytest.raises(RuntimeError, match=r"x must be \[\.\.\., 64\], got \[3, 65\]"):
        library.linear(*wrong)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(RuntimeError, match=r"x must be \[\.\.\., 64\], got \[3, 65\]"),
    ):
        library.linear(*wrong)

# SPDX-License-Identifier: Apache-2.0
"""Grouped products: each group of rows with its expert, which stays stowed."""

import itertools
from typing import Any

import pretended_cuda
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F

import stowage
from stowage._ops import composite
from stowage._ops.device_kernels import MOST_ROWS
from stowage._ops.library import composite_forced
from stowage._tensor.products import grouped

STORAGES = ["f8_e4m3", "int8:row2", "f8_e4m3:row", "int8:block32", "nf4", "nf4:block64:nested"]
EXPERTS, OUT, IN = 4, 256, 64  # 256 rows of 64: where nested scales may be cut
OFFSETS = [[3, 3, 7, 10], [0, 0, 0, 0], [2, 4, 6, 8], [10, 10, 10, 10]]


def experts(storage: str, shape: tuple[int, ...] = (EXPERTS, OUT, IN), **how: Any) -> nn.Parameter:
    torch.manual_seed(0)
    return nn.Parameter(stowage.quantize(torch.randn(shape), storage, **how), requires_grad=False)


def dense(x: Tensor, w: Tensor, ends: list[int], bias: Tensor | None = None) -> Tensor:
    out = torch.zeros(len(x), w.shape[1], dtype=x.dtype)
    for i, (start, end) in enumerate(itertools.pairwise([0, *ends])):
        out[start:end] = F.linear(x[start:end], w[i], None if bias is None else bias[i])
    return out


@pytest.mark.parametrize("ends", OFFSETS)
@pytest.mark.parametrize("storage", STORAGES)
def test_values_and_gradients_are_those_of_each_expert(storage: str, ends: list[int]) -> None:
    w, bias = experts(storage), torch.randn(EXPERTS, OUT, requires_grad=True)
    x = torch.randn(10, IN, requires_grad=True)
    stowage.fallbacks(clear=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        got = stowage.grouped_linear(x, w, torch.tensor(ends), bias)
    wanted = dense(x, w.dequantize(), ends, bias)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert not any(t.is_floating_point() and t.numel() >= OUT * IN for t in saved)
    if ends[-1]:
        grads = [torch.autograd.grad(y.square().sum(), (x, bias)) for y in (got, wanted)]
        torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-3)
    assert stowage.fallbacks() == {}
    assert torch.equal(stowage.grouped_linear(x, w, ends, bias), got)


@pytest.mark.parametrize("storage", ["nf4", "int8:row2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_mm_of_torch_finds_the_experts(dtype: torch.dtype, storage: str) -> None:
    """Either way round, as transformers call it; the stock operator wants all of them plain."""
    w, x = experts(storage, compute_dtype=dtype), torch.randn(10, IN, dtype=dtype)
    back = experts(storage, (EXPERTS, IN, OUT), compute_dtype=dtype)
    offs = torch.tensor([3, 3, 7, 10], dtype=torch.int32)
    stowage.fallbacks(clear=True)
    for got, plain in (
        (F.grouped_mm(x, w.transpose(-2, -1), offs=offs), w.dequantize()),
        (F.grouped_mm(x, w.mT, offs=offs), w.dequantize()),
        (F.grouped_mm(x, back, offs=offs), back.dequantize().mT),
    ):
        tolerance = 1e-4 if dtype is torch.float32 else 0.1
        torch.testing.assert_close(got, dense(x, plain, offs.tolist()), rtol=2e-2, atol=tolerance)
    assert stowage.fallbacks() == {}


class Grouped(nn.Module):
    """Experts both ways round."""

    def __init__(self, storage: str, dtype: torch.dtype, exact: bool = False) -> None:
        super().__init__()
        self.up = experts(storage, compute_dtype=dtype, exact=exact)
        self.down = experts(storage, compute_dtype=dtype, exact=exact)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        wide = F.grouped_mm(x, self.up.transpose(-2, -1), offs=offs)
        return F.grouped_mm(F.silu(wide), self.down, offs=offs)


def compiled_like_eager(
    model: Grouped, backend: Any, tolerance: float, dynamic: bool | None = None
) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    for ends, rows in (([3, 3, 7, 10], 10), ([0, 4, 9, 12], 16), ([0, 0, 0, 0], 5)):
        offs, results = torch.tensor(ends, dtype=torch.int32), []
        for run in (model, compiled):
            torch.manual_seed(1)
            x = torch.randn(rows, IN, dtype=model.up.dtype, requires_grad=True)
            y = run(x, offs)
            results.append([y, torch.autograd.grad(y.square().sum(), x)[0]])
        torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("storage", ["nf4", "nf4:block64:nested", "int8:row2"])
def test_compiled_graphs_hold_one_op_and_no_dequantized_experts(
    storage: str, dtype: torch.dtype
) -> None:
    seen: list[list[str]] = []

    def note(module: torch.fx.GraphModule, inputs: Any) -> Any:
        names = (str(node.target) for node in module.graph.nodes)
        seen.append([name.split(".")[1] for name in names if name.startswith("stowage.")])
        return torch._functorch.aot_autograd.make_boxed_func(module.forward)

    stowage.fallbacks(clear=True)
    compiled_like_eager(Grouped(storage, dtype), aot_autograd(fw_compiler=note), 0.0)
    assert 2 <= len(seen) <= 4  # forward and backward, for one size and then for any
    assert all(names == ["_grouped_linear"] * 2 for names in seen)
    assert stowage.fallbacks() == {}


@pytest.mark.slow
def test_compiled_by_inductor() -> None:
    """Once, for all sizes: that one size is compiled before is seen with other backends."""
    compiled_like_eager(Grouped("nf4", torch.float32), "inductor", 1e-4, dynamic=True)


@pytest.mark.skipif(composite_forced(), reason="exact=True needs the kernels")
def test_exact_experts_are_exact_in_compiled_graphs() -> None:
    compiled_like_eager(Grouped("nf4", torch.float32, exact=True), "aot_eager", 0.0)


def test_experts_that_cut_blocks_are_dequantized_one_at_a_time() -> None:
    w, x = experts("nf4:block64:nested", (3, 5, 7)), torch.randn(6, 7)
    got = stowage.grouped_linear(x, w, [1, 4, 6])
    torch.testing.assert_close(got, dense(x, w.dequantize(), [1, 4, 6]))


@pytest.mark.skipif(composite_forced(), reason="exact=True needs the kernels")
def test_exact_is_bit_equal_to_dense_experts() -> None:
    w, x = experts("nf4", exact=True), torch.randn(10, IN)
    assert torch.equal(
        stowage.grouped_linear(x, w, [3, 3, 7, 10]), dense(x, w.dequantize(), [3, 3, 7, 10])
    )


def test_plain_experts_and_trained_ones() -> None:
    plain = torch.randn(EXPERTS, OUT, IN)
    x = torch.randn(10, IN)
    got = stowage.grouped_linear(x, plain, [1, 2, 3, 10])
    assert torch.equal(got, dense(x, plain, [1, 2, 3, 10]))
    w = nn.Parameter(stowage.quantize(plain, "int8:row2"))
    stowage.grouped_linear(x, w, [1, 2, 3, 10]).sum().backward()
    twin = w.dequantize().detach().requires_grad_()
    dense(x, twin, [1, 2, 3, 10]).sum().backward()
    torch.testing.assert_close(w.grad, twin.grad)


WRONG: dict[str, Any] = {
    "rank of x": lambda x, w: stowage.grouped_linear(x[None], w, [1, 2, 3, 10]),
    "columns": lambda x, w: stowage.grouped_linear(x[:, 1:], w, [1, 2, 3, 10]),
    "rank of weight": lambda x, w: stowage.grouped_linear(x, w[0], [10]),
    "dtype": lambda x, w: stowage.grouped_linear(x.double(), w, [1, 2, 3, 10]),
    "count": lambda x, w: stowage.grouped_linear(x, w, [1, 10]),
    "order": lambda x, w: stowage.grouped_linear(x, w, [5, 2, 3, 10]),
    "end": lambda x, w: stowage.grouped_linear(x, w, [1, 2, 3, 11]),
    "bias": lambda x, w: stowage.grouped_linear(x, w, [1, 2, 3, 10], torch.ones(OUT)),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_refused(case: str) -> None:
    with pytest.raises(stowage.InvalidArgument, match=r"stowage\.grouped_linear: .* must be"):
        WRONG[case](torch.randn(10, IN), experts("nf4"))


# --- on devices whose kernels read the ends ------------------------------------------------------


@pytest.fixture
def device_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels as for a CUDA device, and nothing else that multiplies."""
    if pretended_cuda.library() is None:
        pytest.skip("needs the C++ tests to be built")
    monkeypatch.setattr(composite, "kernels_of", pretended_cuda.kernels_of)

    def by_groups(*args: object) -> Tensor:
        raise AssertionError("rows were multiplied group by group")

    monkeypatch.setattr(grouped, "by_groups", by_groups)


@pytest.mark.usefixtures("device_kernels")
@pytest.mark.parametrize("ends", OFFSETS)
@pytest.mark.parametrize("storage", [*STORAGES, "mxfp4", "q4_k"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_device_needs_no_ends_on_the_host(dtype: torch.dtype, storage: str, ends: Any) -> None:
    w = experts(storage, (EXPERTS, OUT, 256), compute_dtype=dtype)
    x, offs = torch.randn(10, 256, dtype=dtype), torch.tensor(ends, dtype=torch.int32)
    wanted = dense(x.double(), w.dequantize().double(), ends)
    tolerance = 1e-4 if dtype is torch.float32 else 2e-2
    made = F.grouped_mm(x, w.transpose(-2, -1), offs=offs)
    assert made.dtype is dtype
    torch.testing.assert_close(made.double(), wanted, rtol=tolerance, atol=16 * tolerance)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda a, b, c: F.grouped_mm(a, b.transpose(-2, -1), offs=c),
        backend=aot_autograd(fw_compiler=lambda graph, _: graph),
        fullgraph=True,
    )
    assert torch.equal(compiled(x, w, offs), made)


@pytest.mark.usefixtures("device_kernels")
def test_a_device_goes_by_groups_where_a_graph_or_many_rows_want_it() -> None:
    w, offs = experts("nf4"), torch.tensor([3, 3, 7, 10], dtype=torch.int32)
    right, many = w.transpose(-2, -1), MOST_ROWS * EXPERTS + 1
    learns, x = torch.randn(10, IN, requires_grad=True), torch.randn(many, IN)
    wide = experts("nf4", compute_dtype=torch.float64).transpose(-2, -1)
    by_groups = pytest.raises(AssertionError, match="rows were multiplied group by group")
    for args in ((learns, right), (x, right), (torch.randn(10, IN).double(), wide)):
        with by_groups:
            F.grouped_mm(*args, offs=offs)
    with torch.no_grad():
        F.grouped_mm(learns, right, offs=offs)
    F.grouped_mm(x[:-1], right, offs=offs)
    exact = experts("nf4", exact=True).transpose(-2, -1)
    with by_groups:
        F.grouped_mm(x[:-1], exact, offs=offs)

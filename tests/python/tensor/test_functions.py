# SPDX-License-Identifier: Apache-2.0
"""The fast path: linear, embedding and products of stowed weights beside the dequantized ones."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stowage
from stowage._ops.library import composite_forced

STORAGES = ["f8_e4m3", "f8_e5m2:row", "int8", "int8:block48", "nf4", "nf4:block64:nested", "bf16"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS, COLUMNS = 48, 64


def parameter(
    storage: str, dtype: torch.dtype = torch.float32, trained: bool = False
) -> nn.Parameter:
    values = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    return nn.Parameter(stowage.quantize(values, storage, compute_dtype=dtype), trained)


def near(got: Tensor, wanted: Tensor, size: int = COLUMNS) -> bool:
    """Within what the order of sums and one rounding of the result may change."""
    unit = torch.finfo(got.dtype).eps
    scale = wanted.double().abs().amax() + 1
    return bool((got.double() - wanted.double()).abs().amax() <= scale * (4 * unit + size * 2e-7))


def ops_of(run: Callable[[], object]) -> set[str]:
    """Which of our operators a call runs, at any depth."""
    with torch.autograd.profiler.profile() as profile:
        run()
    return {e.name for e in profile.function_events if e.name.startswith("stowage::")}


@pytest.fixture(autouse=True)
def no_fallbacks() -> Iterator[None]:
    stowage.fallbacks(clear=True)
    yield
    assert stowage.fallbacks() == {}


MODES = [torch.no_grad, torch.enable_grad, torch.inference_mode]
BIAS = torch.linspace(-1, 1, ROWS)
# Each is [5, 64] x W^T -> [5, 48], and takes the stowed or the plain weight.
FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda x, w: F.linear(x, w),
    "linear, bias": lambda x, w: F.linear(x, w, BIAS.to(x.dtype)),
    "linear, names": lambda x, w: F.linear(input=x, weight=w, bias=BIAS.to(x.dtype)),
    "linear of 1-d": lambda x, w: torch.stack([F.linear(row, w) for row in x]),
    "linear of 4-d": lambda x, w: F.linear(x[:, None, None], w)[:, 0, 0],
    "linear of a transpose": lambda x, w: F.linear(x.t().contiguous().t(), w),
    "x @ w.t()": lambda x, w: x @ w.t(),
    "x @ w.T": lambda x, w: x @ w.T,
    "x @ w.mT": lambda x, w: x @ w.mT,
    "matmul 3-d": lambda x, w: torch.matmul(x[None], w.t())[0],
    "mm": lambda x, w: torch.mm(x, w.t()),
    "w @ x.t()": lambda x, w: (w @ x.t()).t(),
    "addmm": lambda x, w: torch.addmm(BIAS.to(x.dtype), x, w.t()),
    "row slices": lambda x, w: torch.cat([F.linear(x, w[:32]), F.linear(x, w[32:])], -1),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("storage", STORAGES)
def test_products_are_those_of_the_values(storage: str, dtype: torch.dtype, form: str) -> None:
    if form == "row slices" and storage.endswith("nested"):
        return  # nested scales are shared by 256 blocks: no such slice stays stowed
    w, x = parameter(storage, dtype), torch.randn(5, COLUMNS, dtype=dtype)
    wanted = FORMS[form](x.double(), w.dequantize().double())
    for mode in MODES:
        with mode():
            got = FORMS[form](x, w)
        assert got.dtype == dtype and near(got, wanted)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", FORMS)
def test_a_product_is_one_op(form: str, mode: Callable[[], object]) -> None:
    w, x = parameter("nf4"), torch.randn(5, COLUMNS, requires_grad=True)
    with mode():  # type: ignore[attr-defined]
        assert ops_of(lambda: FORMS[form](x, w)) == {"stowage::linear"}
    y = FORMS[form](x, w)
    assert ops_of(lambda: y.sum().backward()) == {"stowage::linear_grad_input"}


@pytest.mark.parametrize("storage", STORAGES)
def test_products_with_the_weight_not_transposed(storage: str) -> None:
    w, g = parameter(storage), torch.randn(5, ROWS)
    bias = torch.randn(COLUMNS)
    values = w.dequantize().double()
    for mode in MODES:
        with mode():
            assert near(g @ w, g.double() @ values)
            assert near(torch.addmm(bias, g, w), g.double() @ values + bias)  # Conv1D of GPT-2
            assert near(F.linear(g, w.t()), g.double() @ values)
            assert ops_of(lambda: (g @ w, F.linear(g, w.t()))) == {"stowage::linear_grad_input"}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("trained", [False, True])
def test_gradients_are_those_of_the_values(form: str, trained: bool) -> None:
    w = parameter("int8", trained=trained)
    plain = w.dequantize().detach().requires_grad_(trained)
    x = torch.randn(5, COLUMNS, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    FORMS[form](x, w).square().sum().backward()
    FORMS[form](twin, plain).square().sum().backward()
    assert torch.allclose(x.grad, twin.grad, rtol=1e-4, atol=1e-3)
    if trained:
        assert type(w.grad) is Tensor
        assert torch.allclose(w.grad, plain.grad, rtol=1e-4, atol=1e-3)
    else:
        assert w.grad is None


def test_double_backward() -> None:
    w, x = parameter("nf4"), torch.randn(3, COLUMNS, requires_grad=True)

    def penalty(weight: Tensor) -> Tensor:
        (g,) = torch.autograd.grad(F.linear(x, weight).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), x)[0]

    wanted = penalty(w.dequantize())
    assert torch.allclose(penalty(w), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


def test_a_write_between_forward_and_backward_is_noticed() -> None:
    w, x = parameter("int8"), torch.randn(3, COLUMNS, requires_grad=True)
    y = F.linear(x, w)
    w.data.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_autocast(form: str, dtype: torch.dtype) -> None:
    if form == "linear of 1-d":
        return  # autocast does not take torch.stack
    w, x = parameter("int8", dtype), torch.randn(5, COLUMNS, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        got = FORMS[form](x, w)
    rounded = w.dequantize(torch.bfloat16)
    assert got.dtype == torch.bfloat16
    assert near(got, FORMS[form](x.bfloat16().double(), rounded.double()))
    got.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32


def test_autocast_leaves_double_alone() -> None:
    w = parameter("int8", torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert F.linear(torch.randn(2, COLUMNS).double(), w).dtype == torch.float64
    stowage.fallbacks(clear=True)


def test_exact_is_bit_equal_to_the_dense_model() -> None:
    for dtype in DTYPES:
        if dtype is torch.bfloat16 and composite_forced():
            continue  # refused there: it would need bf16 arithmetic
        values = torch.randn(ROWS, COLUMNS)
        w = stowage.quantize(values, "nf4", compute_dtype=dtype, exact=True)
        x = torch.randn(7, COLUMNS, dtype=dtype)
        assert torch.equal(F.linear(x, w), F.linear(x, w.dequantize()))
        assert torch.equal(x @ w.t(), x @ w.dequantize().t())
        assert torch.equal(F.linear(x, nn.Parameter(w, False)), F.linear(x, w.dequantize()))


def test_wrong_arguments_give_the_stock_error() -> None:
    w, plain = parameter("int8"), parameter("int8").dequantize()
    wrong = [
        (torch.randn(2, COLUMNS, dtype=torch.bfloat16), None),
        (torch.randn(2, COLUMNS + 1), None),
        (torch.randn(2, COLUMNS), torch.randn(ROWS + 1)),
    ]
    for x, bias in wrong:
        with pytest.raises(RuntimeError) as stock:
            F.linear(x, plain, bias)
        with pytest.raises(RuntimeError) as ours:
            F.linear(x, w, bias)
        assert "must" in str(ours.value) or str(ours.value) == str(stock.value)
    stowage.fallbacks(clear=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("storage", [*STORAGES, "fp4"])
def test_embedding_is_bit_equal(storage: str, mode: Callable[[], object]) -> None:
    ids = torch.tensor([[0, 47, 3], [3, 3, 9]])
    for dtype in (*DTYPES, torch.float64):
        layer = nn.Embedding(ROWS, COLUMNS, padding_idx=3)
        layer.weight = parameter(storage, dtype)
        with mode():  # type: ignore[attr-defined]
            assert torch.equal(layer(ids), layer.weight.dequantize()[ids])
            assert ops_of(partial(layer, ids)) == {"stowage::embedding"}
    with pytest.raises((IndexError, RuntimeError)):
        layer(torch.tensor([ROWS]))


def test_embedding_gradient() -> None:
    ids = torch.tensor([0, 47, 3, 3])
    w, plain = parameter("nf4", trained=True), parameter("nf4").dequantize().requires_grad_()
    for weight in (w, plain):
        F.embedding(ids, weight, padding_idx=0).square().sum().backward()
    assert torch.equal(w.grad, plain.grad)
    assert F.embedding(ids, parameter("nf4")).requires_grad is False

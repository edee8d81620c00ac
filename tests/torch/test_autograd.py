# SPDX-License-Identifier: Apache-2.0
"""Gradients: equal to those of the dense layer, and nothing dequantized is held for them."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from stowage._ops import library
from stowage._ops.storage import Storage
from stowage._tensor import autograd

SAMPLED = ("f32", "f8_e4m3:row", "int8", "nf4", "nf4:block64:nested")
ROWS, COLUMNS = 24, 64


@pytest.fixture(params=SAMPLED)
def kind(request: pytest.FixtureRequest) -> Storage:
    return Storage(request.param)


class Weight:
    def __init__(self, kind: Storage, device: str, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(3)
        values = torch.randn(ROWS, COLUMNS, generator=generator).to(device)
        self.kind = kind
        self.codes, *self.scales = library.quantize(values, kind.key)
        shape = (ROWS, COLUMNS)
        self.dense = library.dequantize(self.codes, self.scales, kind.key, shape, dtype)

    def linear(self, x: Tensor, bias: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
        return autograd.linear(x, self.codes, self.scales, self.kind.key, ROWS, bias, weight)


@pytest.fixture
def w(kind: Storage, device: str) -> Weight:
    return Weight(kind, device)


def close(a: object, b: object) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(COLUMNS,), (3, COLUMNS), (2, 3, COLUMNS), (40, COLUMNS)])
@pytest.mark.parametrize("trained", [False, True])
def test_linear_gradients(w, shape, trained, device) -> None:
    x = torch.randn(shape, device=device, requires_grad=True)
    bias = torch.randn(ROWS, device=device, requires_grad=True)
    dense = w.dense.clone().requires_grad_(trained)
    ours, theirs = w.linear(x, bias, dense if trained else None), F.linear(x, dense, bias)
    close(ours, theirs)
    g = torch.randn_like(ours)
    wanted = (x, bias, dense) if trained else (x, bias)
    close(torch.autograd.grad(ours, wanted, g), torch.autograd.grad(theirs, wanted, g))


def test_only_what_needs_a_gradient_gets_one(w, device) -> None:
    bias = torch.randn(ROWS, device=device, requires_grad=True)
    y = w.linear(torch.randn(3, COLUMNS, device=device), bias)
    close(torch.autograd.grad(y.sum(), bias)[0], torch.full_like(bias, 3.0))
    assert not w.linear(torch.randn(3, COLUMNS, device=device)).requires_grad


def test_double_backward(w, device) -> None:
    x = torch.randn(3, COLUMNS, device=device, requires_grad=True)
    dense = w.dense.clone().requires_grad_()

    def second(y: Tensor) -> tuple[Tensor, ...]:
        g = torch.ones_like(y).requires_grad_()
        (gx,) = torch.autograd.grad(y, x, g, create_graph=True)
        return torch.autograd.grad(gx.square().sum(), (g, dense))

    close(second(w.linear(x, None, dense)), second(F.linear(x, dense)))


@pytest.mark.parametrize("use", ["functions", "ops"])
def test_nothing_dequantized_is_held(use, device) -> None:
    w = Weight(Storage("f8_e4m3:row"), device, torch.bfloat16)
    x = torch.randn(4, COLUMNS, device=device, dtype=torch.bfloat16, requires_grad=True)
    held: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        if use == "functions":
            w.linear(x)
        else:
            library.linear(x, w.codes, w.scales, w.kind.key, ROWS, None)
    assert {t.data_ptr() for t in held} == {t.data_ptr() for t in (w.codes, *w.scales)}


def test_direct_callers_get_gradients(w, device) -> None:
    x = torch.randn(3, COLUMNS, device=device, requires_grad=True)
    bias = torch.randn(ROWS, device=device, requires_grad=True)
    ours = library.linear(x, w.codes, w.scales, w.kind.key, ROWS, bias)
    theirs = F.linear(x, w.dense, bias)
    pairs = [torch.autograd.grad(y.square().sum(), (x, bias)) for y in (ours, theirs)]
    close(*pairs)
    g = torch.randn(3, ROWS, device=device, requires_grad=True)
    gx = library.linear_grad_input(g, w.codes, w.scales, w.kind.key, COLUMNS)
    close(torch.autograd.grad(gx.sum(), g)[0], w.dense.sum(1).expand(3, -1))


def test_functorch(w, device) -> None:
    x = torch.randn(5, 3, COLUMNS, device=device)
    bias = torch.randn(ROWS, device=device)

    def loss(linear):
        return lambda x, b: linear(x, b).square().sum()

    ours, theirs = loss(w.linear), loss(lambda x, b: F.linear(x, w.dense, b))
    for transform in (
        lambda f: torch.func.grad(f, argnums=(0, 1))(x[0], bias),
        lambda f: torch.func.vmap(torch.func.grad(f), (0, None))(x, bias),
        lambda f: torch.func.jvp(f, (x[0], bias), (x[1], bias)),
        lambda f: torch.func.hessian(f, argnums=1)(x[0, 0], bias),
        lambda f: torch.func.grad(lambda v: torch.func.grad(f)(v, bias).sum())(x[0]),
    ):
        torch.testing.assert_close(transform(ours), transform(theirs), rtol=1e-4, atol=1e-4)
    stacked = torch.randn(5, ROWS, device=device)
    for dims in itertools.product((0, 1, None), (0, None)):
        if dims != (None, None):
            a = torch.func.vmap(w.linear, dims)(
                x.movedim(0, dims[0] or 0) if dims[0] else x, stacked if dims[1] == 0 else bias
            )
            b = torch.func.vmap(lambda v, c: F.linear(v, w.dense, c), dims)(
                x.movedim(0, dims[0] or 0) if dims[0] else x, stacked if dims[1] == 0 else bias
            )
            close(a, b)


def test_forward_mode(w, device) -> None:
    x, t = torch.randn(2, 3, COLUMNS, device=device).unbind()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, t)
        out = torch.autograd.forward_ad.unpack_dual(w.linear(dual))
    close(out.tangent, F.linear(t, w.dense))


@pytest.mark.parametrize(("padding", "by_frequency"), [(None, False), (2, False), (None, True)])
def test_embedding_gradients(w, padding, by_frequency, device) -> None:
    ids = torch.tensor([[1, 2, 1], [2, 0, 23]], device=device)
    dense = w.dense.clone().requires_grad_()
    args = (w.codes, w.scales, w.kind.key, (ROWS, COLUMNS), torch.float32)
    ours = autograd.embedding(ids, *args, dense, padding, by_frequency)
    theirs = F.embedding(ids, dense, padding, scale_grad_by_freq=by_frequency)
    assert torch.equal(ours, theirs)
    g = torch.randn_like(ours)
    assert torch.equal(*(torch.autograd.grad(y, dense, g)[0] for y in (ours, theirs)))
    assert not autograd.embedding(ids, *args).requires_grad


def test_a_tracer_sees_the_op(device) -> None:
    w = Weight(Storage("int8"), device)
    traced = torch.jit.trace(lambda x: w.linear(x) + 1, torch.randn(2, COLUMNS, device=device))
    x = torch.randn(2, COLUMNS, device=device)
    close(traced(x), w.linear(x) + 1)


def test_a_profiler_sees_the_op(device) -> None:
    w = Weight(Storage("int8"), device)
    with torch.profiler.profile() as profile:
        w.linear(torch.randn(2, COLUMNS, device=device))
    assert "stowage::linear" in {event.key for event in profile.key_averages()}


def test_a_mode_sees_the_op(device) -> None:
    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    w = Weight(Storage("int8"), device)
    with Watch():
        w.linear(torch.randn(2, COLUMNS, device=device))
    assert "stowage.linear.default" in seen


def test_a_negated_view_is_read_as_its_values(device) -> None:
    w = Weight(Storage("int8"), device)
    x = torch.randn(3, COLUMNS, dtype=torch.complex64, device=device).conj().imag
    assert x.is_neg()
    close(w.linear(x), F.linear(x.clone(), w.dense))
    close(w.linear(x[:, :COLUMNS]), F.linear(x.resolve_neg(), w.dense))

# SPDX-License-Identifier: Apache-2.0
"""A batch of rows by one matrix that is expanded over it: one product, nothing widened whole."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import stowage

X = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(0)).transpose(0, 1)
PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "x @ w.t()": lambda x, w: torch.bmm(x, w.t().expand(3, 64, -1)),
    "x @ w": lambda x, w: torch.bmm(x, w[:64].expand(3, 64, 64)),
    "linear below autograd": lambda x, w: torch.ops.aten.linear(x, w),
    "rows": lambda x, w: torch.bmm(x, w[32:96].t().expand(3, 64, -1)),
    "one of a square": lambda x, w: torch.bmm(x, w[64:].t().t().expand(3, -1, -1)),
}
OTHERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "columns": lambda x, w: torch.bmm(x[..., :32], w[:, :32].t().expand(3, 32, -1)),
    "rows in a block": lambda x, w: torch.bmm(x, w[1:65].reshape(64, 64).expand(3, 64, 64)),
    "shifted": lambda x, w: torch.bmm(x, w.as_strided((3, 64, 64), (0, 1, 64), 64)),
    "stacked": lambda x, w: torch.bmm(x, w.view(-1)[: 3 * 64 * 8].view(3, 64, 8)),
}


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("storage", ["int8", "nf4", "f8_e4m3:block32", "nf4:block64:nested"])
@pytest.mark.parametrize("form", [*PRODUCTS, *OTHERS])
def test_the_values_are_those_of_the_dense_matrix(form: str, storage: str, trained: bool) -> None:
    w = stowage.quantize(torch.randn(128, 64), storage)
    multiply = (PRODUCTS | OTHERS)[form]
    stowage.fallbacks(clear=True)
    results = []
    for matrix in (w, w.dequantize()):
        x = X.clone().requires_grad_(trained)
        y = multiply(x, matrix)
        if trained:
            y.sum().backward()
        results.append((y, x.grad))
        if form in PRODUCTS and "nested" not in storage:
            assert not any("bmm" in name for name in stowage.fallbacks())
    (y, g), (wanted, dense) = results
    torch.testing.assert_close(y, wanted, atol=1e-4, rtol=1e-4)
    assert not trained or torch.allclose(g, dense, atol=1e-4, rtol=1e-4)


def test_exact_products_of_a_batch_are_bit_equal() -> None:
    w = stowage.quantize(torch.randn(128, 64), "int8", exact=True)
    for multiply in PRODUCTS.values():
        assert torch.equal(multiply(X, w), multiply(X, w.dequantize()))


def test_shapes_that_misfit_have_the_error_of_torch() -> None:
    w = stowage.quantize(torch.randn(64, 64), "int8")
    for x in (X[..., :32], X[:2], X.double()):
        with pytest.raises(RuntimeError) as ours:
            torch.bmm(x, w.t().expand(3, 64, 64))
        with pytest.raises(RuntimeError) as stock:
            torch.bmm(x, w.dequantize().t().expand(3, 64, 64))
        assert str(ours.value) == str(stock.value)


def test_an_rnn_whose_batch_comes_first_widens_nothing_whole() -> None:
    module = nn.GRU(64, 64, 2, batch_first=True, bidirectional=True)
    stowage.stow(module, rules={"weight*": "int8"})
    stowage.fallbacks(clear=True)
    x = torch.randn(2, 5, 64, requires_grad=True)
    module(x)[0].sum().backward()
    assert not stowage.fallbacks()

# SPDX-License-Identifier: Apache-2.0
"""torch.baddbmm of a resting stack and low-rank factors stays a sum: products and gradients beside
those of the plain sum, what falls back to it, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import stowage
from stowage._ops import _torch
from stowage._tensor.products.folded import Folded

EXPERTS, ROWS, COLUMNS, RANK = 4, 32, 64, 4
ENDS = [3, 3, 8, 9]  # rows of each expert, and one row of none
DTYPES = [torch.float32, torch.bfloat16]
STORAGES = ["int8:row2", "nf4", "f8_e4m3:row2", "mxfp4", "bf16"]


class Sum:
    """A folded stack and the plain one, of the same factors."""

    def __init__(self, storage: str = "int8:row2", dtype: torch.dtype = torch.float32) -> None:
        draw = torch.Generator().manual_seed(len(storage))

        def numbers(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw).to(dtype)

        self.stack: Any = stowage.quantize(numbers(EXPERTS, ROWS, COLUMNS), storage)
        self.lhs = numbers(EXPERTS, ROWS, RANK).requires_grad_()
        self.rhs = numbers(EXPERTS, RANK, COLUMNS).requires_grad_()
        self.folded: Any = torch.baddbmm(self.stack, self.lhs, self.rhs, alpha=0.5)
        self.plain = torch.baddbmm(self.stack.dequantize(), self.lhs, self.rhs, alpha=0.5)
        self.x, self.narrow = (
            numbers(10, COLUMNS).requires_grad_(),
            numbers(10, ROWS).requires_grad_(),
        )
        self.offs = torch.tensor(ENDS, dtype=torch.int32)

    def leaves(self) -> list[Tensor]:
        return [self.lhs, self.rhs, self.x, self.narrow]


def grouped(s: Sum, w: Any) -> Tensor:
    if type(w) is Folded:
        return F.grouped_mm(s.x, w.transpose(-2, -1), offs=s.offs)
    parts = zip([0, *ENDS], ENDS, strict=False)
    pieces = [s.x[a:b] @ w[e].t() for e, (a, b) in enumerate(parts)]
    return torch.cat([*pieces, torch.zeros(10 - ENDS[-1], ROWS, dtype=s.x.dtype)])


def grouped_back(s: Sum, w: Any) -> Tensor:
    if type(w) is Folded:
        return F.grouped_mm(s.narrow, w, offs=s.offs)
    parts = zip([0, *ENDS], ENDS, strict=False)
    pieces = [s.narrow[a:b] @ w[e] for e, (a, b) in enumerate(parts)]
    return torch.cat([*pieces, torch.zeros(10 - ENDS[-1], COLUMNS, dtype=s.x.dtype)])


PRODUCTS = {
    "grouped": grouped,
    "grouped, not turned": grouped_back,
    "linear": lambda s, w: F.linear(s.x, w[1], torch.ones(ROWS, dtype=s.x.dtype)),
    "linear by a tensor": lambda s, w: F.linear(s.x, w[torch.tensor(2)]),
    "matmul": lambda s, w: s.x @ w[3].t(),
    "matmul, not turned": lambda s, w: torch.matmul(s.narrow, w[-1]),
    "mm of a selected one": lambda s, w: torch.mm(s.x, w.select(0, 2).T),
    "an expert for each token": lambda s, w: torch.bmm(
        w[torch.tensor([0, 3, 3, 1, 2, 0, 1, 1, 3, 2])], s.x.unsqueeze(-1)
    ).squeeze(-1),
    "a stack that is turned twice": lambda s, w: s.x @ w.mT.transpose(1, 2)[0].mT,
    "what only the plain sum has": lambda s, w: (w * 2).sum(dim=1)[:, :ROWS] @ s.narrow.t(),
}


@pytest.mark.parametrize("compute", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("product", PRODUCTS)
def test_products_and_gradients_are_those_of_the_plain_sum(
    product: str, compute: torch.dtype
) -> None:
    for storage in STORAGES:
        s = Sum(storage, compute)
        assert type(s.folded) is Folded
        got, want = PRODUCTS[product](s, s.folded), PRODUCTS[product](s, s.plain)
        assert type(got) is Tensor and got.dtype == compute and got.shape == want.shape
        bound = 64 * torch.finfo(compute).eps
        assert (got - want).abs().max() <= bound * want.abs().max(), storage
        leaves = [t for t in s.leaves() if _reaches(want, t)]
        grads = torch.autograd.grad(got.float().pow(2).sum(), leaves)
        wanted = torch.autograd.grad(want.float().pow(2).sum(), leaves)
        for grad, other in zip(grads, wanted, strict=True):
            assert (grad - other).abs().max() <= 2 * bound * other.abs().max(), storage


def _reaches(y: Tensor, leaf: Tensor) -> bool:
    found = torch.autograd.grad(y.sum(), leaf, retain_graph=True, allow_unused=True)
    return found[0] is not None


def test_it_says_what_the_plain_sum_would() -> None:
    s = Sum("nf4", torch.bfloat16)
    assert torch.equal(s.folded.dequantize(), s.plain) and torch.equal(s.folded + 0, s.plain)
    assert s.folded.shape == s.plain.shape and s.folded.dtype == s.plain.dtype
    assert s.folded.requires_grad and len(s.folded) == EXPERTS and s.folded.ndim == 3
    assert s.folded.is_contiguous() and s.folded.stride() == s.plain.stride()
    assert str(s.folded) == str(s.plain)
    assert torch.equal(torch.stack(list(s.folded.detach().unbind())), s.plain)
    assert torch.equal(copy.copy(s.folded.detach()), s.plain)
    assert s.folded.dequantize(torch.float32).dtype == torch.float32


def test_dims_that_it_lacks_are_errors_as_of_any_tensor() -> None:
    s = Sum()
    for wrong in (
        lambda w: w.select(3, 0),
        lambda w: w.transpose(4, 5),
        lambda w: w.t(),
        lambda w: w[4],
        lambda w: torch.mm(torch.ones(2, 3, COLUMNS), w[0].T),
    ):
        for w in (s.folded, s.plain):
            with pytest.raises((RuntimeError, IndexError)):
                wrong(w)
    assert torch.equal(s.folded.permute(2, 1, 0), s.plain.permute(2, 1, 0))


def test_transforms_have_the_plain_sum() -> None:
    s = Sum()

    def loss(lhs: Tensor, stack: Any) -> Tensor:
        return F.linear(s.x.detach(), torch.baddbmm(stack, lhs, s.rhs.detach())[1]).pow(2).sum()

    got = torch.func.grad(loss)(s.lhs.detach(), s.stack)
    assert torch.allclose(got, torch.func.grad(loss)(s.lhs.detach(), s.stack.dequantize()))


def test_no_expert_but_those_used_is_dequantized(monkeypatch: pytest.MonkeyPatch) -> None:
    s = Sum()

    def never(self: Any, dtype: Any = None) -> Tensor:
        raise AssertionError("a whole stack was asked for")

    monkeypatch.setattr(stowage.StowedTensor, "dequantize", never)
    grouped(s, s.folded).sum().backward()
    assert s.lhs.grad is not None and s.lhs.grad[1].abs().max() == 0 < s.lhs.grad[2].abs().max()


def test_a_factor_that_was_written_since_is_an_error() -> None:
    s = Sum()
    with torch.no_grad():
        s.lhs.mul_(2)
    with pytest.raises(stowage.InvalidArgument, match=r"one was written since torch\.baddbmm"):
        grouped(s, s.folded)
    s = Sum()
    s.stack.mul_(2)
    with pytest.raises(stowage.InvalidArgument, match=r"one was written since torch\.baddbmm"):
        s.folded.dequantize()


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.add_(1),
        lambda w: w[1].mul_(2),
        lambda w: w.__setitem__(0, 1.0),
        lambda w: w.__iadd__(1),
        lambda w: torch.add(torch.ones(1), 1, out=w),
        lambda w: setattr(w, "data", torch.ones(1)),
    ],
)
def test_writes_are_refused_and_not_lost(write: Any) -> None:
    s = Sum()
    with torch.no_grad(), pytest.raises(stowage.InvalidArgument, match="a plain tensor to write"):
        write(s.folded)


def test_gradients_are_never_lost_below_autograd() -> None:
    s = Sum()
    with (
        _torch.DisableTorchFunctionSubclass(),
        pytest.raises(stowage.InvalidArgument, match="factors would lose their gradients"),
    ):
        torch.add(s.folded, 1)


def test_others_are_plain_sums() -> None:
    s = Sum()
    stack, lhs, rhs = s.stack, s.lhs, s.rhs
    exact = stowage.quantize(s.stack.dequantize(), "int8:row2", exact=True)
    assert torch.equal(torch.baddbmm(exact, lhs, rhs), torch.baddbmm(exact.dequantize(), lhs, rhs))
    for made in (
        torch.baddbmm(exact, lhs, rhs),
        torch.baddbmm(stack, lhs, rhs, beta=0.5),
        torch.baddbmm(stack.dequantize(), lhs, rhs),
        torch.baddbmm(stack[:1], lhs, rhs),  # which is broadcast
    ):
        assert type(made) is Tensor
    with pytest.raises(RuntimeError):
        torch.baddbmm(stack, lhs, rhs[:, :2])
    with torch.autocast("cpu", torch.bfloat16):
        got = F.linear(s.x, s.folded[1])
        assert got.dtype == torch.bfloat16
        want = F.linear(s.x, s.plain[1])
    assert (got - want).abs().max() <= 0.02 * want.abs().max()


def test_compiled_graphs_have_the_plain_sum() -> None:
    s = Sum()

    def run(stack: Tensor, lhs: Tensor, rhs: Tensor, x: Tensor) -> Tensor:
        return F.linear(x, torch.baddbmm(stack, lhs, rhs, alpha=0.5)[1])

    got = torch.compile(run, backend="eager")(s.stack, s.lhs, s.rhs, s.x)
    assert torch.allclose(got, F.linear(s.x, s.plain[1]), rtol=1e-4, atol=1e-4)

# SPDX-License-Identifier: Apache-2.0
"""Tensor algebra of 4-bit weights, operator by operator: the values of the plain tensor, bit for
bit where nothing is summed, and what stays stowed. The peers' tensors refuse or falsify most."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stowage
from stowage.views import StowedView

STORAGES = ["nf4", "fp4:block128", "nf4:block64:nested"]  # one more storage is one more word
ROWS, COLUMNS = 512, 64  # 256 rows hold 256 blocks of 64: the edge of nested scales
MODES = [torch.no_grad, torch.enable_grad, torch.inference_mode]


def stowed(storage: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randn(shape or (ROWS, COLUMNS), generator=torch.Generator().manual_seed(0))
    return stowage.quantize(values, storage, compute_dtype=dtype)


def plain(t: object) -> object:
    if isinstance(t, (list, tuple)):
        return [plain(each) for each in t]
    return t.dequantize() if isinstance(t, (stowage.StowedTensor, StowedView)) else t


def equal(got: object, wanted: object) -> bool:
    if isinstance(wanted, (list, tuple)):
        return all(equal(a, b) for a, b in zip(got, wanted, strict=True))
    return torch.equal(got, wanted)


Form = Callable[[Tensor], object]
STOWED: dict[str, Form] = {
    "detach": lambda w: w.detach(),
    "clone": lambda w: w.clone(),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "copy_": lambda w: w.clone().copy_(w),
    "cpu": lambda w: w.cpu(),
    "to(device)": lambda w: w.to("cpu"),
    "to(other)": lambda w: w.to(torch.zeros(1)),
    "contiguous": lambda w: w.contiguous(),
    "t.t": lambda w: w.t().t(),
    "slice": lambda w: w[256:],
    "narrow": lambda w: w.narrow(0, 0, 256),
    "split": lambda w: w.split(256),
    "split uneven": lambda w: w.split([256, 256, 0]),
    "chunk": lambda w: w.chunk(2),
    "tensor_split": lambda w: w.tensor_split(2),
    "cat of slices": lambda w: torch.cat([w[256:], w[:256]]),
    "cat of itself": lambda w: torch.cat([w, w, w]),
    "vstack": lambda w: torch.vstack([w, w]),
    "stack": lambda w: torch.stack([w, w]),
    "unbind of a stack": lambda w: torch.stack([w, w]).unbind(),
    "select of a stack": lambda w: torch.stack([w, w])[-1],
}
VIEWS: dict[str, Form] = {
    "t": lambda w: w.t(),
    "T": lambda w: w.T,
    "transpose": lambda w: w.transpose(0, 1),
    "permute": lambda w: w.permute(1, 0),
    "view": lambda w: w.view(32, 16, 64),
    "view(-1)": lambda w: w.view(-1),
    "reshape": lambda w: w.reshape(64, 512),
    "flatten": lambda w: w.flatten(),
    "flatten of three": lambda w: w.view(32, 16, 64).flatten(0, 1),
    "select": lambda w: w.select(0, 7),
    "select 1": lambda w: w.select(1, 7),
    "unbind": lambda w: w.view(8, -1).unbind(),
    "slice in a block": lambda w: w[3:9],
    "columns": lambda w: w[:, 8:24],
    "split 1": lambda w: w.split(24, 1),
    "squeeze": lambda w: w[None].squeeze(0),
    "expand": lambda w: w[None].expand(2, -1, -1),
}
BY_BLOCKS = ("slice in a block", "squeeze", "cat of odd pieces")  # stowed for some storages
X = torch.linspace(-1, 1, 6 * COLUMNS).view(6, COLUMNS)
READ: dict[str, Form] = {
    "+": lambda w: w + 1,
    "-": lambda w: 1 - w,
    "*": lambda w: w * w,
    "/": lambda w: w / 3,
    "neg": lambda w: -w,
    "abs": lambda w: w.abs(),
    "pow": lambda w: w**2,
    "sum": lambda w: w.sum(),
    "mean": lambda w: w.mean(1),
    "norm": lambda w: w.norm(),
    "vector_norm": lambda w: torch.linalg.vector_norm(w, dim=1),
    "amax": lambda w: w.amax(0),
    "max": lambda w: w.max(1)[1],
    "==": lambda w: w == w,
    "<": lambda w: w < 0.25,
    "equal": lambda w: torch.tensor(torch.equal(w, w)),
    "allclose": lambda w: torch.tensor(torch.allclose(w, w)),
    "isfinite": lambda w: w.isfinite(),
    "cat 1": lambda w: torch.cat([w, w], 1),
    "cat with plain": lambda w: torch.cat([w, torch.ones(1, COLUMNS)]),
    "cat of odd pieces": lambda w: torch.cat([w[:1], w]),
    "stack 1": lambda w: torch.stack([w, w], 1),
    "hstack": lambda w: torch.hstack([w, w]),
    "where": lambda w: torch.where(w > 0, w, 0.0),
    "gather": lambda w: w.gather(1, torch.zeros(ROWS, 1, dtype=torch.int64)),
    "index": lambda w: w[torch.tensor([[3, -1], [0, 3]])],
    "index_select": lambda w: w.index_select(0, torch.tensor([500, 2])),
    "mask": lambda w: w[torch.arange(ROWS) > 508],
    "tril": lambda w: w.tril(),
    "clamp": lambda w: w.clamp(min=0),
    "item": lambda w: torch.tensor(w[7, 7].item()),
    "to(f64)": lambda w: w.to(torch.float64),
}
NEAR: dict[str, Form] = {
    "svdvals": lambda w: torch.linalg.svdvals(w[:8]),
    "x @ w.t()": lambda w: X @ w.t(),
    "x @ t view": lambda w: torch.matmul(X, w.transpose(0, 1)),
    "w @ x.t()": lambda w: w @ X.t(),
    "mv": lambda w: w.mv(X[0]),
    "einsum": lambda w: torch.einsum("bk,ok->bo", X, w),
    "bmm": lambda w: torch.bmm(X[None], w.t()[None]),
    "addmm": lambda w: torch.addmm(torch.ones(ROWS), X, w.t(), beta=0.5, alpha=2),
    "addmv": lambda w: torch.addmv(torch.ones(ROWS), w, X[0]),
    "baddbmm": lambda w: torch.baddbmm(torch.ones(1, 6, ROWS), X[None], w.t()[None]),
    "tensordot": lambda w: torch.tensordot(X, w, ([1], [1])),
    "inner": lambda w: torch.inner(X, w),
    "linear": lambda w: F.linear(X, w),
    "linear, bias by keyword": lambda w: F.linear(X, weight=w, bias=torch.ones(ROWS)),
    "all by keyword": lambda w: F.linear(input=X, weight=w, bias=torch.ones(ROWS)),
}


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("form", [*STOWED, *VIEWS, *READ])
def test_row_73_every_operator_gives_the_values(form: str, storage: str) -> None:
    run = {**STOWED, **VIEWS, **READ}[form]
    w = stowed(storage)
    wanted = run(w.dequantize())
    kind = stowage.StowedTensor if form in STOWED else StowedView if form in VIEWS else Tensor
    for mode in MODES:
        with mode():
            got = run(w)
            for each in got if isinstance(got, (list, tuple)) else [got]:
                assert type(each) is kind or form in BY_BLOCKS
            assert equal(plain(got), wanted), mode


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("form", NEAR)
def test_row_73_every_product_is_that_of_the_values(form: str, storage: str) -> None:
    w = stowed(storage)
    wanted = NEAR[form](w.dequantize())
    for mode in MODES:
        with mode():
            torch.testing.assert_close(NEAR[form](w), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("storage", STORAGES)
def test_shape_of_a_view_is_that_of_the_plain_one(storage: str) -> None:
    """A peer's t() kept its shape, its view() changed strides only."""
    w = stowed(storage)
    for form in VIEWS.values():
        got, wanted = form(w), form(w.dequantize())
        for a, b in zip(
            got if isinstance(got, (list, tuple)) else [got],
            wanted if isinstance(wanted, (list, tuple)) else [wanted],
            strict=True,
        ):
            assert (a.shape, a.stride(), a.numel()) == (b.shape, b.stride(), b.numel())
            assert a.nbytes == b.nbytes


REFUSED: dict[str, Form] = {
    "view of a wrong size": lambda w: w.view(3, -1),
    "slice by zero": lambda w: w[::0],
    "select out of range": lambda w: w.select(0, ROWS),
    "index out of range": lambda w: w[torch.tensor([ROWS])],
    "index_select below zero": lambda w: w.index_select(0, torch.tensor([-1])),
    "cat of other columns": lambda w: torch.cat([w, w[:, :3]]),
    "stack of other shapes": lambda w: torch.stack([w, w[:256]]),
    "copy_ of another shape": lambda w: w.clone().copy_(w.t()),
    "resize_": lambda w: w.resize_(3, 3),
    "t_": lambda w: w.t_(),
    "numpy": lambda w: w.numpy(),
    "product of a wrong size": lambda w: X @ w,
}


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("form", REFUSED)
def test_what_cannot_be_is_refused_and_nothing_changes(form: str, storage: str) -> None:
    w = stowed(storage)
    before = [p.clone() for p in w.parts.values()]
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        REFUSED[form](w)
    assert equal(list(w.parts.values()), before) and w.shape == (ROWS, COLUMNS)


@pytest.mark.parametrize("storage", STORAGES)
def test_dtypes_of_a_parameter_and_of_a_tensor(storage: str) -> None:
    w = stowed(storage)
    held = nn.Parameter(w, requires_grad=False)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert type(w.to(dtype)) is Tensor and torch.equal(w.to(dtype), w.dequantize(dtype))
        moved = held.to(dtype)
        assert type(moved) is stowage.StowedTensor and moved.dtype == dtype
        assert equal(list(moved.parts.values()), list(w.parts.values()))


@pytest.mark.parametrize("storage", STORAGES)
def test_writes_through_views_reach_the_weight(storage: str) -> None:
    w = stowed(storage)
    w[256:].zero_()
    w.view(-1)[: 256 * COLUMNS].copy_(torch.ones(256 * COLUMNS))
    wanted = torch.cat([torch.ones(256, COLUMNS), torch.zeros(256, COLUMNS)])
    assert torch.allclose(w.dequantize(), wanted, atol=1e-2)
    other = stowed(storage).neg()
    w.t().copy_(other.t())
    assert torch.equal(w.dequantize(), stowage.quantize(other, storage).dequantize())


@pytest.mark.parametrize(("rows", "columns"), [(3, 5), (1, 1), (7, 63), (2, 65), (33, 31), (0, 4)])
@pytest.mark.parametrize("storage", STORAGES)
def test_any_shape(rows: int, columns: int, storage: str) -> None:
    """Rows that are no multiple of the block, odd ones, shorter ones, none."""
    w = stowed(storage, rows, columns)
    values, x = w.dequantize(), torch.randn(4, columns)
    torch.testing.assert_close(F.linear(x, w), F.linear(x, values))
    torch.testing.assert_close(
        F.linear(x[:, :0].new_ones(4, rows), w.t()), x.new_ones(4, rows) @ values
    )
    for form in (
        lambda t: torch.cat([t, t]),
        lambda t: t[1:],
        lambda t: t.t(),
        lambda t: t.view(-1),
    ):
        assert torch.equal(plain(form(w)), form(values))
    assert torch.equal(plain(torch.stack([w, w])), torch.stack([values, values]))
    assert torch.equal(plain(w.clone()), values) and w.numel() == rows * columns

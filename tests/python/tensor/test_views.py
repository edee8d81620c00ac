# SPDX-License-Identifier: Apache-2.0
"""Views of stowed weights: which stay stowed, what the others show, and that they are live."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import stowage
from stowage.views import StowedView

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "t": lambda w: w.t(),
    "T": lambda w: w.T,
    "mT": lambda w: w.mT,
    "t.t": lambda w: w.t().t(),
    "transpose": lambda w: w.transpose(-1, 0),
    "permute": lambda w: w.permute(1, 0),
    "row": lambda w: w[3],
    "column": lambda w: w[:, 3],
    "rows": lambda w: w[2:9],
    "rows of rows": lambda w: w[2:9][1:3],
    "strided rows": lambda w: w[1::3],
    "columns": lambda w: w[:, 8:24],
    "rows, columns": lambda w: w[2:9, 8:24],
    "view": lambda w: w.view(4, 4, -1),
    "view(-1)": lambda w: w.view(-1),
    "reshape": lambda w: w.reshape(32, 32),
    "flatten": lambda w: w.flatten(),
    "chunk": lambda w: w.chunk(3)[1],
    "chunk 1": lambda w: w.chunk(3, 1)[2],
    "split": lambda w: w.split([10, 6])[1],
    "tensor_split": lambda w: w.tensor_split(3)[2],
    "unbind": lambda w: w.unbind()[5],
    "narrow": lambda w: w.narrow(0, 4, 8),
    "expand": lambda w: w.expand(2, 16, 64)[1],
    "diagonal": lambda w: w.diagonal(),
    "unfold": lambda w: w.unfold(0, 4, 2),
    "as_strided": lambda w: w.as_strided((3, 5), (64, 2), 7),
    "rows, as_strided": lambda w: w[2:9].as_strided((3, 5), (64, 2), 135),
    "unsqueeze": lambda w: w.unsqueeze(1),
    "view(int16)": lambda w: w.view(torch.int32),
    "fancy": lambda w: w[[3, 1], 5:7],
    "mask": lambda w: w[torch.arange(16) > 11],
}
STORAGES = ["int8", "f8_e4m3:tensor", "nf4", "nf4:block64:nested", "bf16", "int8:block48"]


def parameter(storage: str, *shape: int) -> nn.Parameter:
    torch.manual_seed(0)
    w = stowage.quantize(torch.randn(shape or (16, 64)), storage, compute_dtype=torch.float32)
    return nn.Parameter(w, requires_grad=False)


def shown(view: Tensor) -> Tensor:
    return view.dequantize() if isinstance(view, (stowage.StowedTensor, StowedView)) else view


@pytest.mark.parametrize("form", VIEWS)
@pytest.mark.parametrize("storage", STORAGES)
def test_views_show_the_values(storage: str, form: str) -> None:
    w = parameter(storage)
    wanted = VIEWS[form](w.dequantize())
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            view = VIEWS[form](w)
            assert (view.shape, view.dtype) == (wanted.shape, wanted.dtype)
            assert view.stride() == wanted.stride()
            assert torch.equal(shown(view), wanted)
            assert torch.equal(view + 1, wanted + 1)


@pytest.mark.parametrize("form", [f for f in VIEWS if f not in ("fancy", "mask")])
@pytest.mark.parametrize("storage", STORAGES)
def test_views_see_later_writes(storage: str, form: str) -> None:
    w = parameter(storage)
    view = VIEWS[form](w)
    w.data.copy_(w.dequantize() * 2)
    assert torch.equal(shown(view), VIEWS[form](w.dequantize()))


STAY = [
    ("f8_e4m3", (3, 9)),
    ("int8", (3, 9)),
    ("int8:tensor", (3, 9)),
    ("int8:block48", (3, 9)),
    ("nf4", (3, 9)),
    ("nf4:block128", (4, 10)),
    ("nf4:block128", (4, 16)),
    ("bf16", (0, 0)),
]
CANNOT_STAY = [("nf4:block128", (3, 10)), ("nf4:block128", (4, 9)), ("nf4:block64:nested", (4, 8))]


@pytest.mark.parametrize(("storage", "rows"), STAY)
def test_row_slices_stay_stowed(storage: str, rows: tuple[int, int]) -> None:
    w = parameter(storage)
    rest = w[slice(*rows)]
    assert type(rest) is stowage.StowedTensor and rest.resting == w.resting
    assert rest.nbytes_at_rest <= w.nbytes_at_rest
    x = torch.randn(2, 64)
    got = nn.functional.linear(x, rest)
    assert torch.equal(got, nn.functional.linear(x, w)[:, slice(*rows)])
    for copied in (rest.clone(), copy.deepcopy(rest), pickle.loads(pickle.dumps(rest))):
        assert torch.equal(copied.dequantize(), w.dequantize()[slice(*rows)])


@pytest.mark.parametrize(("storage", "rows"), CANNOT_STAY)
def test_slices_that_blocks_forbid_are_views(storage: str, rows: tuple[int, int]) -> None:
    w = parameter(storage)
    rest = w[slice(*rows)]
    assert type(rest) is StowedView
    assert torch.equal(rest.dequantize(), w.dequantize()[slice(*rows)])


EXPERTS = {
    "int8:row2": "int8:row",
    "f8_e4m3:row": "f8_e4m3:tensor",
    "f8_e4m3": "f8_e4m3",
    "int8:tensor": "int8:tensor",
    "nf4": "nf4:block64",
}


@pytest.mark.parametrize("storage", EXPERTS)
def test_an_expert_stays_stowed(storage: str) -> None:
    w = parameter(storage, 3, 8, 64)
    x = torch.randn(5, 64)
    stowage.fallbacks(clear=True)
    for experts in ([w[i] for i in range(-3, 0)], list(w.unbind()), list(w)):
        for i, expert in enumerate(experts):
            assert type(expert) is stowage.StowedTensor and expert.resting == EXPERTS[storage]
            assert torch.equal(expert.dequantize(), w.dequantize()[i])
            nn.functional.linear(x, expert)
    assert stowage.fallbacks() == {}
    w.data[1].neg_()
    w.data[2][3:5].fill_(0.0)
    assert torch.equal(w.dequantize()[2, 3:5], torch.zeros(2, 64))
    assert type(parameter("int8:block48", 3, 8, 64)[1]) is StowedView


def test_views_are_copied_as_plain_tensors_or_with_their_weight() -> None:
    w = parameter("int8")
    column = w[:, 3]
    assert torch.equal(pickle.loads(pickle.dumps(column)), w.dequantize()[:, 3])
    assert type(column.clone()) is Tensor
    twin_w, twin_column = copy.deepcopy([w, column])
    twin_w.data.zero_()
    assert torch.equal(twin_column.dequantize(), torch.zeros(16))
    assert "transpose" not in repr(w[2:9].T) and "t of StowedTensor" in repr(w[2:9].T)
    assert type(w.T.half()) is Tensor


BAD_DIMS: dict[str, Callable[[Tensor], object]] = {
    "index_select": lambda w: w.index_select(2, torch.tensor([0])),
    "index_select -": lambda w: w.index_select(-4, torch.tensor([0])),
    "cat": lambda w: torch.cat([w, w], 2),
    "cat -": lambda w: torch.cat([w, w], -4),
    "stack": lambda w: torch.stack([w, w], 3),
    "stack -": lambda w: torch.stack([w, w], -6),
    "split": lambda w: w.split(2, 2),
    "split sizes": lambda w: w.split([2, 14], -4),
    "unbind": lambda w: w.unbind(2),
    "select": lambda w: w.select(2, 0),
    "narrow": lambda w: w.narrow(-4, 0, 1),
    "slice": lambda w: torch.ops.aten.slice.Tensor(w, 2, 0, 1),
    "transpose": lambda w: w.transpose(0, 3),
    "permute": lambda w: w.permute(3, 0),
}


@pytest.mark.parametrize("form", BAD_DIMS)
def test_a_dim_out_of_range_is_an_index_error(form: str) -> None:
    w = parameter("int8")
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        for tensor in (w.dequantize(), w):
            with mode(), pytest.raises(IndexError):
                BAD_DIMS[form](tensor)


def test_a_bad_index_is_the_stock_error() -> None:
    w = parameter("int8")
    for wrong in (lambda: w[16], lambda: w[:, 64], lambda: w.view(3, -1), lambda: w.split(0)):
        with pytest.raises((IndexError, RuntimeError)):
            wrong()

# SPDX-License-Identifier: Apache-2.0
"""Slices that rest on their weight's memory know their weight, whatever becomes of them: a write to
one never moves other rows through a scale that both share."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stowage

SHARED = ["int8:tensor", "f8_e4m3:tensor", "nf4:block128", "nf4:block64:nested"]


def saved(pair: list[Tensor]) -> Any:
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assigned(pair: list[Tensor]) -> list[Tensor]:
    other = stowage.quantize(torch.zeros(pair[1].shape), "int8")
    other.data = pair[1]
    return [pair[0], other]


COPIES: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "as they are": lambda pair: pair,
    "deepcopy": copy.deepcopy,
    "deepcopy, slice first": lambda pair: copy.deepcopy(pair[::-1])[::-1],
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
    "torch.save": saved,
    "data =": assigned,
    "Parameter": lambda pair: [pair[0], nn.Parameter(pair[1], requires_grad=False)],
    "Parameter, deepcopy": lambda pair: copy.deepcopy(
        [pair[0], nn.Parameter(pair[1], requires_grad=False)]
    ),
    "detach": lambda pair: [pair[0], pair[1].detach()],
    "state_dict": lambda pair: list(
        nn.ParameterList(nn.Parameter(t, requires_grad=False) for t in pair).state_dict().values()
    ),
}


@pytest.mark.parametrize("storage", SHARED)
@pytest.mark.parametrize("form", COPIES)
def test_slices_and_their_weight_stay_one(form: str, storage: str) -> None:
    values = torch.randn(1024, 64, generator=torch.Generator().manual_seed(0))
    weight = stowage.quantize(values, storage)
    w, rows = COPIES[form]([weight, weight[256:768][:256]])
    assert type(rows) is stowage.StowedTensor
    before, others = w.dequantize(), torch.ones(1024, dtype=torch.bool)
    others[256:512] = False
    assert torch.equal(rows.dequantize(), before[256:512])
    rows.data.mul_(0.5)
    assert torch.equal(rows.dequantize(), w.dequantize()[256:512])
    assert torch.equal(w.dequantize()[others], before[others])
    assert not torch.equal(w.dequantize()[256:512], before[256:512])
    if storage.endswith("tensor"):
        with pytest.raises(stowage.Unsupported, match="shares scales"):
            rows.data.fill_(100.0)
    w.data.fill_(3.0)
    assert torch.allclose(rows.dequantize(), torch.tensor(3.0))


@pytest.mark.parametrize("storage", SHARED)
def test_one_expert_of_many_stays_a_slice(storage: str) -> None:
    w = stowage.quantize(torch.randn(4, 256, 64), storage)
    for twin, expert in (copy.deepcopy([w, w[1]]), pickle.loads(pickle.dumps([w, w[1]]))):
        before = twin.dequantize()
        expert.mul_(0.5)
        assert torch.equal(twin.dequantize()[[0, 2, 3]], before[[0, 2, 3]])
        assert torch.equal(twin.dequantize()[1], expert.dequantize())


def test_a_slice_keeps_what_was_noted_on_it() -> None:
    rows = nn.Parameter(stowage.quantize(torch.randn(8, 64), "int8:tensor")[2:4], False)
    rows.note = "kept"
    for twin in (copy.deepcopy(rows), pickle.loads(pickle.dumps(rows))):
        assert isinstance(twin, nn.Parameter) and twin.note == "kept" and not twin.requires_grad


def test_clones_and_moves_are_weights_of_their_own() -> None:
    w = stowage.quantize(torch.randn(8, 64), "int8:tensor")
    moved = nn.Linear(64, 2, bias=False)
    moved.weight = nn.Parameter(w[2:4], requires_grad=False)
    before = w.dequantize()
    moved.to(torch.bfloat16)
    for rows in (w[2:4].clone(), moved.weight.data):
        rows.fill_(100.0)  # its own scale
        assert torch.equal(w.dequantize(), before)


CUTS: list[Callable[[Tensor], Any]] = [
    lambda t: t[0:0].split(5),
    lambda t: t[0:0].split(0),
    lambda t: t[0:0].chunk(3),
    lambda t: t[0:0].split([]),
    lambda t: t[0:0].split([0, 0]),
    lambda t: t[0:0].tensor_split(3),
    lambda t: t[0:0].unbind(),
    lambda t: t[:, 0:0].split(3, 1),
    lambda t: t.split(0),
    lambda t: t.split([]),
]


def sizes(cut: Callable[[Tensor], Any], t: Tensor) -> Any:
    try:
        return [tuple(piece.shape) for piece in cut(t)]
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("storage", ["bf16", "f8_e4m3:row", *SHARED])
def test_pieces_of_nothing(storage: str) -> None:
    dense = torch.randn(8, 64)
    weight = stowage.quantize(dense, storage)
    for cut in CUTS:
        assert sizes(cut, weight) == sizes(cut, dense)

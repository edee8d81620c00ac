# SPDX-License-Identifier: Apache-2.0
"""Kept init values are state of the tensor: what they survive, and what invalidates them."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kept_models import one
from torch import nn

import stowage
from stowage.tensor import StowedTensor
from stowage.training import (
    clear_init_value,
    has_init_value,
    init_value,
    init_values,
    quantized_init,
    take_init_value,
)


def _swap(layer: Any) -> Any:
    other = nn.Parameter(layer.weight.detach().clone())
    torch.utils.swap_tensors(layer.weight, other)
    layer.weight = other
    return layer


def _through_swap_flag(layer: Any) -> Any:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return layer.half()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def _pickled(layer: Any) -> Any:
    return pickle.loads(pickle.dumps(layer))


def _saved(layer: Any) -> Any:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


SURVIVE: dict[str, Callable[[Any], Any]] = {
    "to": lambda m: m.to("cpu"),
    "to_dtype": lambda m: m.to(torch.bfloat16),
    "half": lambda m: m.half(),
    "twice": lambda m: m.half().float(),
    "apply": lambda m: m._apply(lambda t: t.to(torch.float16)),
    "swap": _swap,
    "swap_flag": _through_swap_flag,
    "deepcopy": copy.deepcopy,
    "sequential": lambda m: nn.Sequential(m)[0],
    "frozen": lambda m: m.requires_grad_(False).requires_grad_(True),
    "parameter": lambda m: setattr(m, "weight", nn.Parameter(m.weight)) or m,
    "stow": lambda m: stowage.stow(m, "f8_e4m3:tensor", compute_dtype=torch.bfloat16) and m,
    "train": lambda m: m.train().eval(),
}
LOSE: dict[str, Callable[[Any], Any]] = {
    "copy_": lambda m: m.weight.data.copy_(torch.ones(8, 16)) is None or m,
    "same_form": lambda m: m.weight.data.copy_(m.weight.detach().clone()) is None or m,
    "one_row": lambda m: m.weight.data[0].zero_() is None or m,
    "data": lambda m: setattr(m.weight, "data", torch.ones(8, 16)) or m,
    "load": lambda m: m.load_state_dict(nn.Linear(16, 8).state_dict()) and m,
    "load_own": lambda m: m.load_state_dict(m.state_dict()) and m,
    "init_outside": lambda m: m.reset_parameters() or m,
}


@pytest.mark.parametrize("move", SURVIVE.values(), ids=SURVIVE.keys())
def test_it_goes_along_with_the_weight(move: Callable[[Any], Any]) -> None:
    layer = one()
    want = init_value(layer.weight).clone()
    moved = move(layer)
    assert isinstance(moved.weight, StowedTensor)
    assert torch.equal(init_value(moved.weight), want)
    dead = weakref.ref(init_value(moved.weight))
    clear_init_value(moved.weight)
    if moved is layer:
        gc.collect()
        assert dead() is None
    else:
        clear_init_value(layer.weight)


@pytest.mark.parametrize("write", LOSE.values(), ids=LOSE.keys())
def test_writes_outside_invalidate_it(write: Callable[[Any], Any]) -> None:
    layer = one()
    dead = weakref.ref(init_value(layer.weight))
    layer = write(layer)
    assert dead() is None and init_values(layer)[0].state == "invalid"
    with pytest.raises(ValueError, match=r"written since \(copy_, load_state_dict\)"):
        init_value(layer.weight)


@pytest.mark.parametrize("move", [_pickled, _saved])
def test_pickles_leave_it_out(move: Callable[[Any], Any]) -> None:
    layer = one()
    back = move(layer)
    assert torch.equal(back.weight.parts["codes"], layer.weight.parts["codes"])
    assert not has_init_value(back.weight) and has_init_value(layer.weight)


def test_a_weight_without_one_takes_the_data_of_one_that_has() -> None:
    layer = one()
    other = torch.nn.Parameter(stowage.quantize(torch.zeros(3, 4), "int8"), requires_grad=False)
    other.data = layer.weight
    assert torch.equal(other.dequantize(), layer.weight.dequantize())
    assert has_init_value(layer.weight) and not has_init_value(other)


def test_deep_copies_have_a_state_of_their_own() -> None:
    layer = one()
    other = copy.deepcopy(layer)
    want = init_value(layer.weight).clone()
    layer.weight.data.zero_()
    assert not has_init_value(layer.weight)
    assert torch.equal(take_init_value(other.weight), want)


def test_to_meta_and_to_empty_keep_nothing() -> None:
    layer = one()
    dead = weakref.ref(init_value(layer.weight))
    layer.to("meta")
    assert dead() is None and init_values(layer)[0][1:] == ("unset", "none", 0)
    layer.to_empty(device="cpu")
    with pytest.raises(ValueError, match="never initialised"):
        init_value(layer.weight)


def test_a_stowed_tensor_that_is_read_as_before() -> None:
    layer = one()
    assert torch.equal(layer.weight.dequantize(), stowage.quantize(
        init_value(layer.weight), "f8_e4m3:tensor").dequantize())  # fmt: skip


def test_values_that_are_given_as_data_end_what_was_kept() -> None:
    """Also where they bring another compute type."""
    for dtype in (torch.float32, torch.float16):
        layer = one()
        assert has_init_value(layer.weight)
        layer.weight.data = torch.zeros(layer.weight.shape, dtype=dtype)
        assert not has_init_value(layer.weight) and layer.weight.dtype is dtype
        with pytest.raises(stowage.StowageError):
            init_value(layer.weight)


def test_values_that_are_given_as_data_by_a_constructor_are_kept() -> None:
    """In the compute type that they bring."""
    given = torch.randn(8, 64).half()
    with quantized_init("int8:row", preserve_init=True):
        layer = nn.Linear(64, 8)
        layer.weight.data = given
    assert layer.weight.dtype is torch.float16 and torch.equal(init_value(layer.weight), given)
    wanted = stowage.quantize(given, "int8:row").dequantize()
    assert torch.equal(layer.weight.dequantize(), wanted)

# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's tests of preserved init values, on the CPU, and able to fail."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import stowage
from stowage.compat.transformer_engine import pytorch as te
from stowage.compat.transformer_engine.common import recipe


def made(**options: Any) -> Any:
    torch.manual_seed(0)
    with te.quantized_model_init(preserve_high_precision_init_val=True, **options):
        return te.Linear(32, 16, params_dtype=torch.bfloat16)


RECIPES = [
    None,
    recipe.DelayedScaling(),
    recipe.Float8CurrentScaling(),
    recipe.Float8BlockScaling(),
]


@pytest.mark.parametrize("kind", RECIPES)
def test_requantizing_the_preserved_value_gives_the_weight(kind: Any) -> None:
    torch.manual_seed(0)
    want = te.Linear(32, 16, params_dtype=torch.bfloat16)
    layer = made(recipe=kind)
    value = layer.weight.get_high_precision_init_val()
    assert value.device.type == "cpu" and value.dtype == torch.bfloat16
    assert torch.equal(value, want.weight.data) and torch.equal(layer.bias, want.bias)
    copied = layer.weight.detach().clone()
    copied.copy_(value)
    assert torch.equal(copied.dequantize(), layer.weight.dequantize())
    assert (value - layer.weight.dequantize()).abs().max() > 0


def test_clear_really_clears() -> None:
    layer = made()
    dead = weakref.ref(layer.weight.get_high_precision_init_val())
    assert dead() is not None
    layer.weight.clear_high_precision_init_val()
    assert dead() is None
    assert layer.weight.get_high_precision_init_val() is None
    layer.weight.clear_high_precision_init_val()


@pytest.mark.parametrize("move", ["cpu", "half", "float", "deepcopy"])
def test_the_methods_survive(move: str) -> None:
    layer = made()
    want = layer.weight.get_high_precision_init_val().clone()
    moved = copy.deepcopy(layer) if move == "deepcopy" else getattr(layer, move)()
    assert torch.equal(moved.weight.get_high_precision_init_val(), want)
    moved.weight.clear_high_precision_init_val()
    assert moved.weight.get_high_precision_init_val() is None
    assert (layer.weight.get_high_precision_init_val() is None) == (moved is layer)


def test_a_loaded_weight_has_none() -> None:
    """There the value of the random init stays, and masters start from it."""
    layer = made()
    layer.weight.data.copy_(torch.ones(16, 32))
    assert layer.weight.get_high_precision_init_val() is None


def test_names_and_what_stays_plain() -> None:
    with te.fp8_model_init(enabled=False):
        assert not isinstance(te.Linear(4, 4).weight, stowage.StowedTensor)
    with te.fp8_model_init():
        layer, other = te.Linear(4, 4, bias=False), nn.Linear(4, 4)
    assert isinstance(layer.weight, stowage.StowedTensor)
    assert not isinstance(other.weight, stowage.StowedTensor)
    assert not hasattr(layer.weight, "get_high_precision_init_val")  # nothing was preserved
    x = torch.randn(2, 4)
    assert torch.allclose(layer(x), x @ layer.weight.dequantize().t())
    assert layer.weight.resting == "f8_e4m3:tensor"
    drawn = te.Linear(4, 4, init_method=nn.init.ones_)
    assert drawn.weight.sum() == 16


def test_names_without_a_meaning_here_say_what_to_use() -> None:
    with pytest.raises(NotImplementedError, match="quantized_init takes every storage"):
        made(recipe=object())
    with pytest.raises(NotImplementedError, match="make it of those"):
        te.LayerNormMLP  # noqa: B018
    with pytest.raises(NotImplementedError, match="convert_float8"):
        te.autocast  # noqa: B018
    with pytest.raises(AttributeError):
        te.nothing  # noqa: B018

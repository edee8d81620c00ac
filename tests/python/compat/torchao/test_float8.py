# SPDX-License-Identifier: Apache-2.0
"""torchao's names of fp8 training over Stowage, and torchao itself where it is installed."""

import copy
import math

import pytest
import torch
from torch import nn

from stowage.compat.torchao import float8
from stowage.compat.torchao.float8 import (
    CastConfig,
    Float8LinearConfig,
    ScalingGranularity,
    ScalingType,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)
from stowage.compat.torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

NAMES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 16))


@pytest.mark.parametrize("name", NAMES)
def test_recipes_by_name(name: str) -> None:
    config = Float8LinearConfig.from_recipe_name(name)
    model = convert_to_float8_training(net(), config=config)
    assert model[0].weight._layer.recipe.name == name
    assert model[0].weight._layer.recipe.pow2 == (name != "tensorwise")
    with pytest.raises(ValueError):
        Float8LinearConfig.from_recipe_name("columns")


def test_filters_take_modules_and_names() -> None:
    model = convert_to_float8_training(
        net(), module_filter_fn=lambda module, name: name == "2", config=Float8LinearConfig()
    )
    assert not isinstance(model[0].weight, WeightWithDynamicFloat8CastTensor)
    assert isinstance(model[2].weight, WeightWithDynamicFloat8CastTensor)
    assert convert_to_float8_training(nn.Linear(4, 4))(torch.ones(1, 4)).shape == (1, 4)


def test_casts_that_no_recipe_does_are_refused() -> None:
    off, row = CastConfig(ScalingType.DISABLED), ScalingGranularity.AXISWISE
    with pytest.raises(NotImplementedError, match="must be those of"):
        Float8LinearConfig(cast_config_input=off)
    with pytest.raises(NotImplementedError, match="must be those of"):
        Float8LinearConfig(cast_config_weight=CastConfig(scaling_granularity=row))
    with pytest.raises(ValueError, match="one dtype"):
        Float8LinearConfig(
            cast_config_grad_output=CastConfig(target_dtype=torch.float8_e5m2),
            cast_config_grad_output_for_grad_weight=CastConfig(target_dtype=torch.float8_e4m3fn),
        )


def test_scales_of_powers_of_two_and_what_copies_keep() -> None:
    """Rows 80 and 81: the configuration holds for the gather, and no copy loses a scale."""
    config = Float8LinearConfig(round_scales_to_power_of_2=True)
    model = convert_to_float8_training(net(), config=config)
    precompute_float8_dynamic_scale_for_fsdp(model)
    weight = model[0].weight
    scale = weight.fresh_scale()
    assert math.frexp(scale.item())[0] == 0.5
    for other in (weight.detach(), weight.data, weight.clone(), weight.detach().view(-1)):
        assert other._stamp.fresh_scale() == scale
    with torch.no_grad():
        weight.mul_(100)  # row 82
    assert weight._stamp.fresh_scale() is None and weight.fresh_scale() < scale / 50


@pytest.mark.parametrize("name", NAMES)
def test_the_same_calls_of_torchao_give_the_same(name: str) -> None:
    peer = pytest.importorskip("torchao.float8", exc_type=ImportError)
    start = net()
    results = []
    for library in (peer, float8):
        config = library.Float8LinearConfig.from_recipe_name(name)
        object.__setattr__(config, "emulate", True)
        model = library.convert_to_float8_training(copy.deepcopy(start), config=config)
        torch.manual_seed(1)
        y = model(torch.randn(16, 32))
        y.square().mean().backward()
        results.append([y, model[2].weight.grad, model[0].weight.grad])
    # A code may fall to the other side of a tie, since the factors are applied in another order.
    for theirs, ours in zip(*results, strict=True):
        assert (theirs - ours).norm() / theirs.norm() < 5e-3

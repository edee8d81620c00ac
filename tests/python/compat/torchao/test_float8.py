# SPDX-License-Identifier: Apache-2.0
"""torchao's names of fp8 training over Stowage, and torchao itself where it is installed."""

import copy
import importlib
import importlib.util
import itertools
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


SIZES = (1000, 1008, 1024, 1040, 2048, 2064, 4096, 4112)


@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_filters_by_size_are_those_of_the_table(name: str) -> None:
    takes = float8._auto_filter_for_recipe(name, ["head", "gate"])
    theirs = takes
    if importlib.util.find_spec("torchao") is not None:
        peer = importlib.import_module("torchao.float8")
        theirs = peer._auto_filter_for_recipe(name, ["head", "gate"])
    with torch.device("meta"):
        for n, k in itertools.product(SIZES, SIZES):
            small = k <= 4096 and n <= 1024
            if name == "rowwise":
                small = n <= 2048 or k <= 1024 or (n <= 4096 and k <= 2048)
            layer = nn.Linear(k, n)
            want = not small and n % 16 == 0 and k % 16 == 0
            assert takes(layer, "mlp.up") == theirs(layer, "mlp.up") == want, (n, k)
    large = nn.Linear(8192, 8192, device="meta")
    assert takes(large, "up") and not takes(large, "lm_head") and not takes(large, "0.gate.w")
    assert not takes(nn.Embedding(8192, 8192, device="meta"), "up")


def test_filters_of_other_recipes_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="must be 'tensorwise' or 'rowwise'"):
        float8._auto_filter_for_recipe("rowwise_with_gw_hp", [])
    with pytest.raises(ValueError):
        float8._auto_filter_for_recipe("columns", [])


def test_converted_layers_are_instances_of_its_class() -> None:
    plain, Float8Linear = nn.Linear(4, 4), float8.float8_linear.Float8Linear
    assert not isinstance(plain, Float8Linear) and not isinstance(nn.ReLU(), Float8Linear)
    assert Float8Linear.from_float(plain, Float8LinearConfig()) is plain
    assert isinstance(plain, Float8Linear) and type(plain) is nn.Linear
    assert float8.float8_linear_utils.convert_to_float8_training is convert_to_float8_training


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

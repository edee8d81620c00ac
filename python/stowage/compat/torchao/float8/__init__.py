# SPDX-License-Identifier: Apache-2.0
"""torchao.float8 over stowage.training: the modules stay stock, gathers are always fp8."""

from collections.abc import Callable

from torch import nn

from stowage.compat.torchao.float8 import fsdp_utils
from stowage.compat.torchao.float8.config import (
    CastConfig,
    Float8GemmConfig,
    Float8LinearConfig,
    Float8LinearRecipeName,
    ScalingGranularity,
    ScalingType,
    recipe_of,
)
from stowage.compat.torchao.float8.fsdp_utils import precompute_float8_dynamic_scale_for_fsdp
from stowage.training import convert_float8

__all__ = [
    "CastConfig",
    "Float8GemmConfig",
    "Float8LinearConfig",
    "Float8LinearRecipeName",
    "ScalingGranularity",
    "ScalingType",
    "convert_to_float8_training",
    "fsdp_utils",
    "precompute_float8_dynamic_scale_for_fsdp",
]


def convert_to_float8_training(
    module: nn.Module,
    *,
    module_filter_fn: Callable[[nn.Module, str], bool] | None = None,
    config: Float8LinearConfig | None = None,
) -> nn.Module:
    """Lets the nn.Linear modules that the filter takes multiply in fp8, as `config` says."""
    given = Float8LinearConfig() if config is None else config
    return convert_float8(
        module,
        recipe_of(given),
        filter=module_filter_fn,
        forward=given.cast_config_weight.target_dtype,
        backward=given.cast_config_grad_output.target_dtype,
        pow2=given.round_scales_to_power_of_2,
    )

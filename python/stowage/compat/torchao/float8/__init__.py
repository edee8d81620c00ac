# SPDX-License-Identifier: Apache-2.0
"""torchao.float8 over stowage.training: the modules stay stock, gathers are always fp8."""

from stowage.compat.torchao.float8 import (
    config,
    float8_linear,
    float8_linear_utils,
    fsdp_utils,
)
from stowage.compat.torchao.float8.config import (
    CastConfig,
    Float8GemmConfig,
    Float8LinearConfig,
    Float8LinearRecipeName,
    ScalingGranularity,
    ScalingType,
)
from stowage.compat.torchao.float8.float8_linear_utils import (
    _auto_filter_for_recipe,
    convert_to_float8_training,
)
from stowage.compat.torchao.float8.fsdp_utils import precompute_float8_dynamic_scale_for_fsdp

__all__ = [
    "CastConfig",
    "Float8GemmConfig",
    "Float8LinearConfig",
    "Float8LinearRecipeName",
    "ScalingGranularity",
    "ScalingType",
    "_auto_filter_for_recipe",
    "config",
    "convert_to_float8_training",
    "float8_linear",
    "float8_linear_utils",
    "fsdp_utils",
    "precompute_float8_dynamic_scale_for_fsdp",
]

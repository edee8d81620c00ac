# SPDX-License-Identifier: Apache-2.0
"""Training in fp8: linear layers that multiply fp8 values, and fp8 bytes on the wire of FSDP2."""

from stowage.training.conversion import convert_float8
from stowage.training.history import reset_history
from stowage.training.init.kept import (
    InitValue,
    clear_init_value,
    has_init_value,
    init_value,
    init_values,
    take_init_value,
)
from stowage.training.init.quantized_init import quantized_init
from stowage.training.layers import check
from stowage.training.master_casts import from_masters
from stowage.training.opaque_hooks import opaque_hooks
from stowage.training.optimizing import MasterOptimizer
from stowage.training.recipes import RECIPES, Recipe
from stowage.training.scale_refresh import refresh_scales
from stowage.training.trained_weight import TrainedWeight

__all__ = [
    "RECIPES",
    "InitValue",
    "MasterOptimizer",
    "Recipe",
    "TrainedWeight",
    "check",
    "clear_init_value",
    "convert_float8",
    "from_masters",
    "has_init_value",
    "init_value",
    "init_values",
    "opaque_hooks",
    "quantized_init",
    "refresh_scales",
    "reset_history",
    "take_init_value",
]

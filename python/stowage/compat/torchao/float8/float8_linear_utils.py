# SPDX-License-Identifier: Apache-2.0
"""torchao.float8.float8_linear_utils: conversion, and which layers are worth it."""

from collections.abc import Callable, Sequence

from torch import nn

from stowage._ops.errors import Unsupported
from stowage.compat.torchao.float8.config import (
    Float8LinearConfig,
    Float8LinearRecipeName,
    recipe_of,
)
from stowage.training import convert_float8

__all__ = ["convert_to_float8_training"]


def convert_to_float8_training(
    module: nn.Module,
    *,
    module_filter_fn: Callable[[nn.Module, str], bool] | None = None,
    config: Float8LinearConfig | None = None,
) -> nn.Module:
    """Lets the nn.Linear modules that the filter takes multiply in fp8, as `config` says."""
    given = Float8LinearConfig() if config is None else config
    takes = module_filter_fn
    return convert_float8(
        module,
        recipe_of(given),
        filter=None if takes is None else lambda name, module: takes(module, name),
        forward=given.cast_config_weight.target_dtype,
        backward=given.cast_config_grad_output.target_dtype,
        pow2=given.round_scales_to_power_of_2,
    )


def _pays_by_tensors(rows: int, columns: int) -> bool:
    return columns > 4096 or rows > 1024


def _pays_by_rows(rows: int, columns: int) -> bool:
    return rows > 2048 and columns > 1024 and (rows > 4096 or columns > 2048)


_PAYS = {
    Float8LinearRecipeName.TENSORWISE: _pays_by_tensors,
    Float8LinearRecipeName.ROWWISE: _pays_by_rows,
}


def _auto_filter_for_recipe(
    recipe: str | Float8LinearRecipeName, filter_fqns: Sequence[str]
) -> Callable[[nn.Module, str], bool]:
    """A filter for conversion that takes an nn.Linear whose sizes are multiples of 16 and large
    enough that torchao measured a gain on an H100, and whose name has none of `filter_fqns` in it.

    Raises ValueError for an unknown recipe, Unsupported for one that torchao has no sizes of."""
    name = Float8LinearRecipeName(recipe)
    pays = _PAYS.get(name)
    if pays is None:
        known = " or ".join(repr(one.value) for one in _PAYS)
        raise Unsupported(
            f"_auto_filter_for_recipe: recipe must be {known}, of which torchao names the sizes "
            f"that gain, got {name.value!r}; write a filter of your own"
        )

    def takes(module: nn.Module, fqn: str) -> bool:
        if not isinstance(module, nn.Linear) or any(part in fqn for part in filter_fqns):
            return False
        rows, columns = module.weight.shape
        return rows % 16 == 0 and columns % 16 == 0 and pays(rows, columns)

    return takes

# SPDX-License-Identifier: Apache-2.0
"""What a float8 linear layer casts, how, and which of its products stay in high precision."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from stowage._ops.errors import raise_problems
from stowage.training.scales import SCALE_MODES, amax_of, scale_of

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Recipe:
    """One row of the table in docs/training.md."""

    name: str
    rows: bool = False  # one scale for each row (of what is summed over), not one for the tensor
    delayed: bool = False  # scales of earlier steps
    products: Literal["fp8", "high"] = "fp8"  # "high": only what travels is fp8
    grad_weight: Literal["fp8", "high"] = "fp8"
    forward: torch.dtype = torch.float8_e4m3fn  # of inputs and weights
    backward: torch.dtype = torch.float8_e5m2  # of the gradients of outputs
    scale_mode: str = "torchao"
    pow2: bool = False
    history_length: int = 16  # delayed: steps that are remembered
    margin: int = 0  # delayed: scales are divided by 2 to this power
    rule: Literal["max", "most_recent"] = "max"  # delayed: which of the remembered count
    gather: Literal["fp8", "high"] = "fp8"  # what FSDP2 sends: codes, or values that are cast then


_E4M3 = torch.float8_e4m3fn
RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("tensorwise"),
        Recipe("delayed", delayed=True),
        Recipe("rowwise", rows=True, backward=_E4M3, pow2=True),
        Recipe("rowwise_with_gw_hp", rows=True, backward=_E4M3, pow2=True, grad_weight="high"),
        Recipe("gather_only", products="high", grad_weight="high"),
    )
}


def recipe_of(name: str, changes: dict[str, Any]) -> Recipe:
    """The recipe `name` with the `changes` that are not None. Raises InvalidArgument."""
    problems = []
    if name not in RECIPES:
        problems.append(f"recipe must be one of {', '.join(RECIPES)}, got {name!r}")
    given = {key: value for key, value in changes.items() if value is not None}
    if given.get("scale_mode", "te") not in SCALE_MODES:
        problems.append(
            f"scale_mode must be one of {', '.join(SCALE_MODES)}, got {given['scale_mode']!r}"
        )
    problems += [
        f"{key} must be torch.float8_e4m3fn or torch.float8_e5m2, got {given[key]}"
        for key in ("forward", "backward")
        if given.get(key, _E4M3) not in _FLOAT8
    ]
    only_delayed = sorted({"history_length", "margin", "rule"} & given.keys())
    if only_delayed and name in RECIPES and not RECIPES[name].delayed:
        problems.append(f"{', '.join(only_delayed)} must come with recipe 'delayed', got {name!r}")
    if given.get("rule", "max") not in ("max", "most_recent"):
        problems.append(f"rule must be 'max' or 'most_recent', got {given['rule']!r}")
    if given.get("gather", "fp8") not in ("fp8", "high"):
        problems.append(f"gather must be 'fp8' or 'high', got {given['gather']!r}")
    if given.get("history_length", 1) < 1 or given.get("margin", 0) < 0:
        problems.append("history_length must be at least 1 and margin at least 0")
    if given.get("forward", _E4M3) == given.get("backward", _E4M3) == torch.float8_e5m2:
        problems.append("forward and backward must not both be float8_e5m2")
    raise_problems("convert_float8", problems)
    return replace(RECIPES[name], **given)


def tensor_scale(amax: Tensor, recipe: Recipe) -> Tensor:
    """The scale of this step's values: all recipes but `delayed`."""
    return scale_of(amax, recipe.forward, recipe.scale_mode, margin=recipe.margin, pow2=recipe.pow2)


def row_scales(value: Tensor, recipe: Recipe) -> Tensor:
    """[rows, 1], from the rows that are here alone."""
    return tensor_scale(amax_of(value, 1), recipe)

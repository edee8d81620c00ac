# SPDX-License-Identifier: Apache-2.0
"""What a float8 linear layer casts, how, and which of its products stay in high precision.

The scale that values are multiplied by before a cast comes of their largest magnitude by one of two
rules, each bit for bit that of the library it is named after: `torchao` and `te`. In both the scale
s multiplies, q = cast(clamp(fl(x s), -F, F)), and a reader multiplies by fl(1 / s).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from stowage._ops import library
from stowage._ops.errors import InvalidArgument, raise_problems
from stowage._ops.numbers import rounding

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
ScaleMode = Literal["torchao", "te"]
SCALE_MODES: tuple[str, ...] = get_args(ScaleMode)
EPS = 1e-12  # no amax counts as smaller, in the rule of torchao
_EXPONENT, _MANTISSA = 0x7F800000, 0x007FFFFF


@dataclass(frozen=True)
class Recipe:
    """One row of the table in docs/training.md: what a float8 layer casts, how, and when.

    Example:
        >>> stowage.training.RECIPES["rowwise"].rows
        True
    """

    name: str  # as `convert_float8` takes it
    rows: bool = False  # one scale for each row (of what is summed over), not one for the tensor
    delayed: bool = False  # scales of earlier steps
    products: Literal["fp8", "high"] = "fp8"  # "high": only what travels is fp8
    grad_weight: Literal["fp8", "high"] = "fp8"  # "high": in the weight's dtype
    forward: torch.dtype = torch.float8_e4m3fn  # of inputs and weights
    backward: torch.dtype = torch.float8_e5m2  # of the gradients of outputs
    scale_mode: str = "torchao"  # whose rule makes scales
    pow2: bool = False  # scales are powers of two
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


def largest(target: torch.dtype) -> float:
    """The largest finite value of a float8 dtype: the one table of them is torch's own."""
    return torch.finfo(target).max


def amax_of(values: Tensor, dim: int | None = None) -> Tensor:
    """max |x| in fp32: of everything (a scalar, 0 for no values), or over `dim`, which stays as 1.

    NaN if there is one; an empty `dim` gives 0.
    """
    if dim is None and values.device.type == "cpu":
        return amaxes([values])[0]
    v = values.detach().abs()
    if dim is None:
        return (v.amax() if v.numel() else v.new_zeros(())).to(torch.float32)
    if not v.shape[dim]:
        shape = list(v.shape)
        shape[dim] = 1
        return v.new_zeros(shape, dtype=torch.float32)
    return v.amax(dim, keepdim=True).to(torch.float32)


def amaxes(values: Sequence[Tensor]) -> Tensor:
    """amax_of of each whole tensor, fp32 [count]; one or more, on one device. No gradient flows."""
    if torch.compiler.is_compiling():
        return rounding.amaxes(values)
    with torch.no_grad():
        found: Tensor = library.amax([*values])
    return found


def power_of_two(scale: Tensor) -> Tensor:
    """The largest power of two that is not above each fp32 value > 0; 0, inf and NaN stay.

    By masking bits, so that it is exact for every value: log2 rounds up just below a power.
    """
    if scale.dtype != torch.float32:
        raise InvalidArgument(f"power_of_two: scale must be float32, got {scale.dtype}")
    bits = scale.view(torch.int32)
    low = bits & _MANTISSA
    top = low
    for shift in (1, 2, 4, 8, 16):  # a subnormal keeps its highest bit
        top = top | (top >> shift)
    top = top ^ (top >> 1)
    exponent = bits & _EXPONENT
    masked = torch.where(exponent == 0, top, exponent)
    return torch.where(exponent == _EXPONENT, bits, masked).view(torch.float32)


def scale_of(
    amax: Tensor,
    target: torch.dtype,
    mode: str = "torchao",
    *,
    margin: int = 0,
    pow2: bool = False,
    source: torch.dtype = torch.float32,
) -> Tensor:
    """The fp32 scales of values whose largest magnitudes are `amax` (fp32, any shape).

    torchao: F / max(amax, 1e-12) in fp64, rounded to fp32; inf gives 0 and NaN gives NaN.
    te: F / amax in fp32, over 2^margin; amax 0, inf or NaN gives 1, and an infinite quotient the
    largest value of `source`, the dtype of the values.
    `pow2` rounds down to a power of two. Raises InvalidArgument for an unknown mode.
    """
    if mode == "torchao":
        wide = amax.to(torch.float64).clamp(min=EPS)
        scale = (torch.full_like(wide, largest(target)) / wide).to(torch.float32)
        scale = scale / 2.0**margin if margin else scale
    elif mode == "te":
        scale = torch.full_like(amax, largest(target)) / amax
        scale = scale / 2.0**margin if margin else scale
        most = torch.full_like(scale, torch.finfo(source).max)
        scale = torch.where(torch.isinf(scale), most, scale)
        scale = torch.where((amax == 0) | ~torch.isfinite(amax), torch.ones_like(scale), scale)
    else:
        raise InvalidArgument(f"scale_of: mode must be one of {', '.join(SCALE_MODES)}, got {mode}")
    return power_of_two(scale) if pow2 else scale

# SPDX-License-Identifier: Apache-2.0
"""torchao's configuration of float8 training, and the recipe of Stowage that it stands for."""

import enum
from dataclasses import dataclass, replace
from typing import Any

import torch

from stowage._ops.errors import InvalidArgument, Unsupported

_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class ScalingType(enum.Enum):
    """Whether an operand is cast."""

    DYNAMIC = "dynamic"
    DISABLED = "disabled"

    def short_str(self) -> str:
        return "dyn" if self is ScalingType.DYNAMIC else "dis"


class ScalingGranularity(enum.Enum):
    """What shares a scale."""

    TENSORWISE = "tensorwise"
    AXISWISE = "axiswise"

    def short_str(self) -> str:
        return "ten" if self is ScalingGranularity.TENSORWISE else "axs"


@dataclass(frozen=True)
class CastConfig:
    """How one operand is cast; target_dtype None is that of the operand's role."""

    scaling_type: ScalingType = ScalingType.DYNAMIC
    scaling_granularity: ScalingGranularity = ScalingGranularity.TENSORWISE
    target_dtype: torch.dtype | None = None

    def short_str(self) -> str:
        codes = {_E4M3: "e4m3", _E5M2: "e5m2"}[self.target_dtype or _E4M3]
        return f"{self.scaling_type.short_str()}_{self.scaling_granularity.short_str()}_{codes}"


@dataclass(frozen=True)
class Float8GemmConfig:
    """Taken and not used: the forward product may be fast, the others are not."""

    use_fast_accum: bool = False


class Float8LinearRecipeName(enum.Enum):
    """The recipes that `Float8LinearConfig.from_recipe_name` takes."""

    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"
    ROWWISE_WITH_GW_HP = "rowwise_with_gw_hp"


@dataclass(frozen=True)
class Float8LinearConfig:
    """The fields of torchao 0.18. Raises Unsupported for casts that no recipe of ours does."""

    cast_config_input: CastConfig = CastConfig()
    cast_config_input_for_grad_weight: CastConfig | None = None
    cast_config_weight: CastConfig = CastConfig()
    cast_config_weight_for_grad_input: CastConfig | None = None
    cast_config_grad_output: CastConfig = CastConfig()
    cast_config_grad_output_for_grad_weight: CastConfig | None = None
    gemm_config_output: Float8GemmConfig = Float8GemmConfig(True)
    gemm_config_grad_input: Float8GemmConfig = Float8GemmConfig()
    gemm_config_grad_weight: Float8GemmConfig = Float8GemmConfig()
    enable_fsdp_float8_all_gather: bool = False
    pad_inner_dim: bool = False
    emulate: bool = False
    force_recompute_fp8_weight_in_bwd: bool = False
    round_scales_to_power_of_2: bool = False

    def __post_init__(self) -> None:
        for role, other, default in (
            ("input", "input_for_grad_weight", _E4M3),
            ("weight", "weight_for_grad_input", _E4M3),
            ("grad_output", "grad_output_for_grad_weight", _E5M2),
        ):
            first = _with_dtype(getattr(self, f"cast_config_{role}"), default)
            second = _with_dtype(getattr(self, f"cast_config_{other}") or first, default)
            if first.target_dtype != second.target_dtype:
                raise InvalidArgument(
                    f"Float8LinearConfig: {role} must be cast to one dtype, got "
                    f"{first.target_dtype} and {second.target_dtype}"
                )
            object.__setattr__(self, f"cast_config_{role}", first)
            object.__setattr__(self, f"cast_config_{other}", second)
        recipe_of(self)

    @staticmethod
    def from_recipe_name(recipe_name: Float8LinearRecipeName | str) -> "Float8LinearConfig":
        """The configuration of one of torchao's three recipes. Raises ValueError."""
        name = Float8LinearRecipeName(recipe_name)
        if name is Float8LinearRecipeName.TENSORWISE:
            return Float8LinearConfig()
        rows = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE, target_dtype=_E4M3)
        facts: dict[str, Any] = {}
        if name is Float8LinearRecipeName.ROWWISE_WITH_GW_HP:
            high = CastConfig(ScalingType.DISABLED, target_dtype=_E4M3)
            facts = {
                "cast_config_input_for_grad_weight": high,
                "cast_config_weight_for_grad_input": CastConfig(),
                "cast_config_grad_output_for_grad_weight": high,
            }
        return Float8LinearConfig(
            cast_config_input=rows,
            cast_config_weight=rows,
            cast_config_grad_output=rows,
            round_scales_to_power_of_2=True,
            **facts,
        )


def _with_dtype(cast: CastConfig, default: torch.dtype) -> CastConfig:
    return cast if cast.target_dtype is not None else replace(cast, target_dtype=default)


def _kind(cast: CastConfig | None) -> str:
    if cast is None or cast.scaling_type is ScalingType.DISABLED:
        return "high"
    return cast.scaling_granularity.value


_TENSOR, _ROW, _HIGH = "tensorwise", "axiswise", "high"
_RECIPES = {  # x, x for grad_weight, W, W for grad_input, g, g for grad_weight
    (_TENSOR,) * 6: "tensorwise",
    (_ROW,) * 6: "rowwise",
    (_ROW, _HIGH, _ROW, _TENSOR, _ROW, _HIGH): "rowwise_with_gw_hp",
}


def recipe_of(config: Float8LinearConfig) -> str:
    """The name of our recipe with these casts. Raises Unsupported."""
    kinds = tuple(
        _kind(cast)
        for cast in (
            config.cast_config_input,
            config.cast_config_input_for_grad_weight,
            config.cast_config_weight,
            config.cast_config_weight_for_grad_input,
            config.cast_config_grad_output,
            config.cast_config_grad_output_for_grad_weight,
        )
    )
    dtypes = (config.cast_config_input.target_dtype, config.cast_config_weight.target_dtype)
    if kinds not in _RECIPES or dtypes[0] != dtypes[1]:
        raise Unsupported(
            "Float8LinearConfig: the casts must be those of tensorwise, rowwise or "
            f"rowwise_with_gw_hp, with one dtype for input and weight, got {', '.join(kinds)} "
            f"and {dtypes[0]}, {dtypes[1]}"
        )
    return _RECIPES[kinds]

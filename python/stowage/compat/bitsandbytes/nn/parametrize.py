# SPDX-License-Identifier: Apache-2.0
"""`bitsandbytes.nn.parametrize`: any parameter of a module as packed codes that are dequantized
where the module reads it. What such a module saves, it loads."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from stowage._ops.errors import InvalidArgument
from stowage.compat.bitsandbytes import functional
from stowage.compat.bitsandbytes._state import QuantState


class Bnb4bitParametrization(nn.Module):
    """Dequantizes packed codes by `quant_state`."""

    def __init__(self, quant_state: QuantState) -> None:
        super().__init__()
        self.quant_state = quant_state

    @torch.no_grad()
    def forward(self, quantized_param: Tensor) -> Tensor:
        return functional.dequantize_4bit(quantized_param, self.quant_state)


def replace_parameter_4bit(
    module: nn.Module,
    param_name: str,
    compress_statistics: bool = False,
    quant_type: str = "nf4",
    blocksize: int | None = None,
) -> None:
    """Quantizes the parameter. Raises AttributeError where there is none of that name, TypeError
    where it is no parameter."""
    packed, state = functional.quantize_4bit(
        _parameter(module, param_name),
        blocksize=blocksize,
        compress_statistics=compress_statistics,
        quant_type=quant_type,
    )
    setattr(module, param_name, nn.Parameter(packed, requires_grad=False))
    _parametrized(module, param_name, state)


def replace_parameter_4bit_prequantized(
    module: nn.Module, param_name: str, qs_dict: Mapping[str, Any], device: Any
) -> None:
    """For a parameter that holds packed codes already; `qs_dict` is that of their state."""
    _parameter(module, param_name)
    _parametrized(module, param_name, QuantState.from_dict(qs_dict, device))


def _parameter(module: nn.Module, name: str) -> nn.Parameter:
    found = getattr(module, name)
    if not isinstance(found, nn.Parameter):
        raise TypeError(f"stowage: {name!r} must be an nn.Parameter, got {type(found).__name__}")
    return found


def _parametrized(module: nn.Module, name: str, state: QuantState) -> None:
    dequantizer = Bnb4bitParametrization(state)
    parametrize.register_parametrization(module, name, dequantizer, unsafe=True)
    _register_parametrization_hooks(module, name)


def _register_parametrization_hooks(module: nn.Module, param_name: str) -> None:
    module.register_state_dict_post_hook(partial(_after_saving, param_name=param_name))
    module.register_load_state_dict_pre_hook(partial(_before_loading, param_name=param_name))
    module.register_forward_pre_hook(_enable_parametrization_cache)
    # Checkpointing leaves a recomputed forward by an exception: the count must go down then too.
    module.register_forward_hook(_disable_parametrization_cache, always_call=True)


def _enable_parametrization_cache(module: nn.Module, inputs: Any) -> None:
    parametrize._cache_enabled += 1


def _disable_parametrization_cache(module: nn.Module, inputs: Any, output: Any) -> None:
    parametrize._cache_enabled = max(0, parametrize._cache_enabled - 1)
    if not parametrize._cache_enabled:
        parametrize._cache = {}


def _dequantizer(module: Any, name: str) -> Bnb4bitParametrization:
    for step in module.parametrizations[name]:
        if isinstance(step, Bnb4bitParametrization):
            return step
    raise InvalidArgument(f"stowage: {name!r} must rest as packed codes, got plain values")


def _after_saving(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    *,
    param_name: str,
) -> None:
    """Puts the codes under the name of the parameter, and the parts of the state beside them."""
    original = state_dict.pop(f"{prefix}parametrizations.{param_name}.original", None)
    if original is None:
        return
    state_dict[prefix + param_name] = original
    state = _dequantizer(module, param_name).quant_state
    for name, part in state.as_dict(packed=True).items():
        state_dict[f"{prefix}{param_name}.{name}"] = part


def _before_loading(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
    *,
    param_name: str,
) -> None:
    """The way back. Float values are quantized as those that are there were."""
    name = prefix + param_name
    value = state_dict.pop(name, None)
    if value is None:
        return
    step = _dequantizer(module, param_name)
    old = step.quant_state
    found = {k: state_dict.pop(k) for k in list(state_dict) if k.startswith(name + ".")}
    if found:
        state = QuantState.from_dict(found, old.absmax.device)
    else:
        value, state = functional.quantize_4bit(
            value,
            blocksize=old.blocksize,
            compress_statistics=old.nested,
            quant_type=old.quant_type,
        )
    if state.shape != old.shape:
        error_msgs.append(f"{name}: must be {list(old.shape)}, got {list(state.shape)}")
        return
    step.quant_state = state
    state_dict[f"{prefix}parametrizations.{param_name}.original"] = value

# SPDX-License-Identifier: Apache-2.0
"""What diffusers' ModelMixin offers as methods, as functions over any module, and a context in
which the methods are ours."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from stowage._model.reports.report import report
from stowage._model.stow import unstow
from stowage._ops.errors import InvalidArgument
from stowage._tensor.views import PACKED
from stowage.compat.diffusers.hooks import group_offloading as grouping
from stowage.compat.diffusers.hooks import layerwise_casting as casting


def enable_layerwise_casting(
    model: nn.Module,
    storage_dtype: torch.dtype = torch.float8_e4m3fn,
    compute_dtype: torch.dtype | None = None,
    skip_modules_pattern: casting.Patterns | None = None,
    skip_modules_classes: casting.Classes | None = None,
    non_blocking: bool = False,
    *,
    exact: bool = False,
) -> None:
    """`apply_layerwise_casting` with what the model says of itself: its `_keep_in_fp32_modules` and
    `_skip_layerwise_casting_patterns` are skipped too. Without `skip_modules_pattern` the default
    patterns and the adapters of PEFT are skipped. `compute_dtype` None is `model.dtype`, or the
    first floating parameter's where a module has none."""
    if skip_modules_pattern is None:
        patterns = [*casting.DEFAULT_SKIP_MODULES_PATTERN, *_adapter_patterns(model)]
    else:
        patterns = list(casting.listed(skip_modules_pattern))
    for declared in ("_keep_in_fp32_modules", "_skip_layerwise_casting_patterns"):
        patterns += casting.listed(getattr(model, declared, None))
    casting.apply_layerwise_casting(
        model,
        storage_dtype,
        _dtype(model) if compute_dtype is None else compute_dtype,
        tuple(dict.fromkeys(patterns)),
        skip_modules_classes,
        non_blocking,
        exact=exact,
    )


def disable_layerwise_casting(model: nn.Module) -> None:
    """Turns every resting weight of `model` into a plain one in its compute dtype. The values are
    the rounded ones; as after casting, the weights are frozen. diffusers has no such method."""
    unstow(model)


def get_memory_footprint(model: nn.Module, return_buffers: bool = True) -> int:
    """Bytes of the parameters as they rest, and of the buffers. diffusers multiplies counts by
    element sizes, which for a resting weight gives the bytes of its compute dtype."""
    found = report(model)
    return found.rest_bytes + (found.buffer_bytes if return_buffers else 0)


@contextmanager
def patched() -> Iterator[None]:
    """Within it, `model.enable_layerwise_casting`, `.disable_layerwise_casting` and
    `.get_memory_footprint` of diffusers' models, and `apply_layerwise_casting` and
    `apply_group_offloading` of `diffusers.hooks` (so `enable_group_offload` of models and
    pipelines), are those of this package, in the whole process; `save_lora_adapter` writes the
    values of adapters that were cast. Models that were cast or offloaded
    inside stay so afterwards. Raises ImportError without diffusers."""
    modeling = importlib.import_module("diffusers.models.modeling_utils")
    theirs = importlib.import_module("diffusers.hooks")
    inner = importlib.import_module("diffusers.hooks.layerwise_casting")
    methods: dict[str, Callable[..., Any]] = {
        "enable_layerwise_casting": enable_layerwise_casting,
        "disable_layerwise_casting": disable_layerwise_casting,
        "get_memory_footprint": get_memory_footprint,
    }
    functions: dict[str, Callable[..., Any]] = {
        "apply_layerwise_casting": casting.apply_layerwise_casting,
        "apply_layerwise_casting_hook": casting.apply_layerwise_casting_hook,
    }
    changed: list[tuple[Any, str, Any]] = []
    try:
        places = [(modeling.ModelMixin, methods), (theirs, functions), (inner, functions)]
        for place, ours in [*places, *_offloading_places(theirs), *_saving_places()]:
            for name, function in ours.items():
                changed.append((place, name, vars(place).get(name)))
                setattr(place, name, function)
        yield
    finally:
        for place, name, function in reversed(changed):
            if function is None:
                delattr(place, name)
            else:
                setattr(place, name, function)


def _offloading_places(hooks: Any) -> list[tuple[Any, dict[str, Callable[..., Any]]]]:
    """Where diffusers has the functions of group offloading; some modules import them by name."""
    names = (
        "apply_group_offloading",
        "_is_group_offload_enabled",
        "_get_group_onload_device",
        "_maybe_remove_and_reapply_group_offloading",
    )
    ours: dict[str, Callable[..., Any]] = {name: getattr(grouping, name) for name in names}
    inner = importlib.import_module("diffusers.hooks.group_offloading")
    first = names[0]
    found: list[tuple[Any, dict[str, Callable[..., Any]]]] = [(hooks, {first: ours[first]})]
    for path, module in list(sys.modules.items()):
        if module is inner or path.startswith(("diffusers.loaders", "diffusers.modular_pipelines")):
            here = {name: ours[name] for name in names if name in vars(module)}
            found.append((module, here))
    return found


def _saving_places() -> list[tuple[Any, dict[str, Callable[..., Any]]]]:
    """Where `save_lora_adapter` takes an adapter from, whose weights may have been cast."""
    try:
        utils = importlib.import_module("peft.utils")
    except ImportError:
        return []
    taken = utils.get_peft_model_state_dict

    def get_peft_model_state_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
        found = taken(*args, **kwargs).items()
        return {k: v.dequantize() if isinstance(v, PACKED) else v for k, v in found}

    return [(utils, {"get_peft_model_state_dict": get_peft_model_state_dict})]


def _dtype(model: nn.Module) -> torch.dtype:
    given = getattr(model, "dtype", None)
    if isinstance(given, torch.dtype):
        return given
    for parameter in model.parameters():
        if parameter.is_floating_point():
            return parameter.dtype
    raise InvalidArgument(
        "stowage: compute_dtype must be given for a model without floating parameters, got None"
    )


def _adapter_patterns(model: nn.Module) -> list[str]:
    """The names under which PEFT puts adapters beside a base layer."""
    names = {
        name: None
        for module in model.modules()
        for name in getattr(module, "adapter_layer_names", None) or ()
    }
    return [rf"(?:^|\.){re.escape(name)}(?:\.|$)" for name in names]

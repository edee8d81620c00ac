# SPDX-License-Identifier: Apache-2.0
"""Builds a model from a factory without memory for its weights, and with real buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from stowage._errors import InvalidArgument

# Memory without content: what modules allocate for the parameters that they then initialize.
_ALLOCATORS = frozenset({torch.empty, torch.empty_strided, torch.rand, torch.randn, torch.normal})
# What initializes them. On the meta device it would do nothing, but importing torch's Python code
# for the first of these there takes 28 MiB.
_INITIALIZERS = frozenset(
    getattr(torch.Tensor, f"{name}_")
    for name in ("normal", "uniform", "zero", "fill", "copy", "add", "sub", "mul", "div", "clamp")
)


class _WithoutWeights(TorchFunctionMode):
    """Puts uninitialised and random tensors on the meta device and everything else on the CPU, also
    inside `with torch.device("meta")`: buffers are mostly computed, and no file holds those that
    are not persistent (rotary frequencies, position ids)."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _INITIALIZERS or getattr(func, "__module__", "") == "torch.nn.init":
            target = args[0] if args else kwargs["tensor"]
            if target.is_meta:
                return target
        if func in _ALLOCATORS:
            kwargs["device"] = "meta"
        elif func in _device_constructors():
            asked = kwargs.get("device")
            if asked is not None and torch.device(asked).type == "meta":
                kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def build(factory: Callable[[], nn.Module]) -> nn.Module:
    """Calls `factory`; the parameters of the model are on the meta device, where initializing them
    costs nothing, and its computed buffers have values."""
    try:
        with _WithoutWeights():
            model = factory()
    except (NotImplementedError, RuntimeError) as error:
        raise InvalidArgument(
            "stowage.load: the factory must be able to build the model with parameters on the meta "
            f"device, got {type(error).__name__}: {error}. Build the model and pass it instead"
        ) from error
    if not isinstance(model, nn.Module):
        raise InvalidArgument(
            f"stowage.load: the factory must return a Module, got {type(model).__name__}"
        )
    return model

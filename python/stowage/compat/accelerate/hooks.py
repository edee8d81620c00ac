# SPDX-License-Identifier: Apache-2.0
"""`accelerate.hooks`. Weights need no hooks here: those of this module move inputs and outputs, and
whole models, between devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from stowage._ops.errors import InvalidArgument, Unsupported
from stowage._tiers.device.activations import device_of
from stowage.compat.accelerate._attaching import (
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    frame,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from stowage.compat.accelerate._casting import LayerwiseCastingHook, attach_layerwise_casting_hooks
from stowage.compat.accelerate._files import PrefixedDataset
from stowage.compat.accelerate._maps import same_device
from stowage.compat.accelerate._moving import send
from stowage.compat.accelerate._peer import forwarded
from stowage.compat.accelerate._tensors import named_module_tensors, set_module_tensor_to_device

__all__ = [
    "AlignDevicesHook",
    "CpuOffload",
    "LayerwiseCastingHook",
    "ModelHook",
    "SequentialHook",
    "UserCpuOffloadHook",
    "add_hook_to_module",
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook",
    "attach_layerwise_casting_hooks",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
]
Device = int | str | torch.device
Names = str | list[str] | None


class AlignDevicesHook(ModelHook):
    """Keeps a module's tensors on `execution_device` and fetches its inputs there; with
    `io_same_device` the output goes where the input was.

    `offload` has a meaning on the CPU only, where weights rest and compute: those that the module
    lacks (on the meta device) come from `weights_map`. For an accelerator it raises Unsupported:
    `stowage.offload(model, device=...)` fetches weights there. `offload_buffers` and
    `tied_params_map` are taken and have no effect. Threads may share a hook.
    """

    def __init__(
        self,
        execution_device: Device | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, torch.Tensor] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: Names = None,
        tied_params_map: Mapping[int, Any] | None = None,
    ) -> None:
        self.execution_device, self.offload = execution_device, offload
        self.io_same_device, self.weights_map = io_same_device, weights_map
        self.offload_buffers, self.place_submodules = offload_buffers, place_submodules
        self.skip_keys, self.tied_params_map = skip_keys, tied_params_map
        computes = "cpu" if execution_device is None else torch.device(execution_device).type
        if offload and computes != "cpu":
            raise Unsupported(
                "stowage: AlignDevicesHook(offload=True) must have execution_device='cpu', got "
                f"{execution_device!r}; stowage.offload(model, device=...) fetches weights to one"
            )

    def init_hook(self, module: nn.Module) -> nn.Module:
        tensors = list(named_module_tensors(module, recurse=self.place_submodules))
        if self.offload:
            missing = [name for name, tensor in tensors if tensor.is_meta]
            values = self.weights_map or {}
            lost = [name for name in missing if name not in values]
            if lost:
                raise InvalidArgument(
                    f"stowage: weights_map must have what is on the meta device, lacks {lost}"
                )
            for name in missing:
                set_module_tensor_to_device(module, name, "cpu", value=values[name])
        elif self.execution_device is not None:
            where = torch.device(self.execution_device)
            for name, tensor in tensors:
                if not same_device(tensor.device, where):
                    set_module_tensor_to_device(module, name, where)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if self.io_same_device:
            frame()[id(self)] = device_of([args, kwargs])
        if self.execution_device is None:
            return args, kwargs
        where = torch.device(self.execution_device)
        return send(args, where), send(kwargs, where, self.skip_keys)

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        where = frame().pop(id(self), None)
        return output if where is None else send(output, where, self.skip_keys)


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Device,
    skip_keys: Names = None,
    preload_module_classes: Iterable[str] | None = None,
    tied_params_map: Mapping[int, Any] | None = None,
) -> None:
    """An `AlignDevicesHook` around each module below `module` that holds tensors and has no hook,
    and around itself."""
    if getattr(module, "_hf_hook", None) is None and module.state_dict():
        add_hook_to_module(module, AlignDevicesHook(execution_device, skip_keys=skip_keys))
    if type(module).__name__ in tuple(preload_module_classes or ()):
        return
    for child in module.children():
        attach_execution_device_hook(child, execution_device, skip_keys, preload_module_classes)


def attach_align_device_hook(
    module: nn.Module,
    execution_device: Device | None = None,
    offload: bool = False,
    weights_map: Mapping[str, torch.Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: Names = None,
    preload_module_classes: Iterable[str] | None = None,
    tied_params_map: Mapping[int, Any] | None = None,
) -> None:
    """An `AlignDevicesHook` around each module with tensors of its own; `weights_map` has them by
    their names from the root, `module_name` is the name of `module` there."""
    whole = offload and type(module).__name__ in tuple(preload_module_classes or ())
    if whole or any(True for _ in named_module_tensors(module)):
        inside = f"{module_name}." if module_name else ""
        values = None if weights_map is None else PrefixedDataset(weights_map, inside)
        hook = AlignDevicesHook(
            execution_device,
            offload,
            weights_map=values,
            offload_buffers=offload_buffers,
            place_submodules=whole,
            skip_keys=skip_keys,
        )
        add_hook_to_module(module, hook, append=True)
    for name, child in () if whole else module.named_children():
        inner = f"{module_name}.{name}" if module_name else name
        attach_align_device_hook(
            child,
            execution_device,
            offload,
            weights_map,
            offload_buffers,
            inner,
            skip_keys,
            preload_module_classes,
        )


def attach_align_device_hook_on_blocks(module: nn.Module, *args: Any, **kwargs: Any) -> NoReturn:
    """Raises Unsupported: `dispatch_model` is what puts blocks on devices."""
    raise Unsupported(
        "stowage: blocks must be put on devices by dispatch_model(model, device_map), which "
        "attaches what they need"
    )


class CpuOffload(ModelHook):
    """Keeps a model on the CPU until it is called, then on `execution_device` (the accelerator, if
    there is one) until it is sent back, after sending back the one before."""

    def __init__(
        self,
        execution_device: Device | None = None,
        prev_module_hook: UserCpuOffloadHook | None = None,
    ) -> None:
        self.prev_module_hook = prev_module_hook
        found = torch.accelerator.current_accelerator(check_available=True)
        default = torch.device("cpu") if found is None else torch.device(found.type, 0)
        self.execution_device = default if execution_device is None else execution_device

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to("cpu")

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if isinstance(self.prev_module_hook, UserCpuOffloadHook):
            self.prev_module_hook.offload()
        where = torch.device(self.execution_device)
        if any(not same_device(tensor.device, where) for tensor in module.parameters()):
            module.to(where)
        return send(args, where), send(kwargs, where)


class UserCpuOffloadHook:
    """A model and its hook: `offload()` sends it to the CPU, `remove()` removes the hook."""

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model, self.hook = model, hook

    def offload(self) -> None:
        if any(tensor.device.type != "cpu" for tensor in self.model.parameters()):
            self.hook.init_hook(self.model)

    def remove(self) -> None:
        remove_hook_from_module(self.model)


def __getattr__(name: str) -> Any:
    return forwarded("accelerate.hooks", name)

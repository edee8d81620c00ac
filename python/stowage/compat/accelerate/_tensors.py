# SPDX-License-Identifier: Apache-2.0
"""Tensors of modules by name: listing them, and putting one somewhere else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from stowage._ops import _torch
from stowage._ops.errors import InvalidArgument
from stowage._tensor.quantize import quantize
from stowage._tensor.stowed import StowedTensor
from stowage._tiers.maps.module_sizes import Dtype, torch_dtype

_QUANTIZED = ("Int8Params", "FP4Params", "Params4bit")  # bitsandbytes: rebuilt with what they carry


def named_module_tensors(
    module: nn.Module,
    include_buffers: bool = True,
    recurse: bool = False,
    remove_non_persistent: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then buffers, with their names."""
    yield from module.named_parameters(recurse=recurse)
    if include_buffers:
        removed: set[str] = set()
        if remove_non_persistent:
            removed = get_non_persistent_buffers(module, recurse=recurse, fqns=True)
        for name, buffer in module.named_buffers(recurse=recurse):
            if name not in removed:
                yield name, buffer


def get_non_persistent_buffers(
    module: nn.Module, recurse: bool = False, fqns: bool = False
) -> set[str]:
    """Names of buffers that are not in `state_dict()`: their own, or dotted ones with `fqns`."""
    found = set(_torch.non_persistent(module))
    if recurse:
        for path, part in module.named_modules():
            inside = f"{path}." if fqns and path else ""
            found |= {inside + name for name in _torch.non_persistent(part)}
    return found


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: int | str | torch.device,
    value: Any = None,
    dtype: Dtype | None = None,
    fp16_statistics: Tensor | None = None,
    tied_params_map: Mapping[int, Any] | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Moves the tensor `tensor_name` of `module` (dotted names reach inside) to `device`, or puts
    `value` there, in the dtype of the old one or in `dtype`. A weight that rests stays at rest:
    a plain value is quantized to its storage.

    `tied_params_map` and `clear_cache` are taken and have no effect: ties are one object here, and
    no memory pool is emptied. Raises ValueError for an unknown name, a value of another shape, or
    no value where the old tensor has none.
    """
    path, _, name = tensor_name.rpartition(".")
    holder = module.get_submodule(path)
    if name not in _torch.parameters(holder) and name not in _torch.buffers(holder):
        raise InvalidArgument(
            f"stowage: {tensor_name!r} must be a parameter or a buffer of {type(holder).__name__}, "
            "it has none of that name"
        )
    old = getattr(holder, name)
    where = torch.device(device)
    if value is None:
        if old.is_meta and where.type != "meta":
            raise InvalidArgument(
                f"stowage: {name!r} is on the meta device, we need a `value` to put in on {device}"
            )
        new = old.detach().to(where, non_blocking=non_blocking)
        if dtype is not None and where.type == "meta" and old.is_floating_point():
            new = new.to(torch_dtype(dtype))
    else:
        new = _value(value, old, name, torch_dtype(dtype)).to(where, non_blocking=non_blocking)
    _put(holder, name, old, new)
    if fp16_statistics is not None:
        getattr(holder, name).SCB = fp16_statistics.to(where)


def _value(given: Any, old: Tensor, name: str, dtype: torch.dtype | None) -> Tensor:
    value = given.detach() if isinstance(given, Tensor) else torch.tensor(given)
    if value.shape != old.shape and type(old).__name__ != "Params4bit":
        raise InvalidArgument(
            f"stowage: {name!r} must have shape {list(old.shape)}, got a tensor of shape "
            f"{list(value.shape)}"
        )
    if isinstance(value, StowedTensor):
        return value
    if isinstance(old, StowedTensor) and dtype is None:
        return quantize(value.to(old.dtype), old.resting)
    if dtype is None:
        return value.to(old.dtype)
    return value.to(dtype) if value.is_floating_point() else value


def _put(holder: nn.Module, name: str, old: Tensor, new: Tensor) -> None:
    if name in _torch.buffers(holder):
        _torch.buffers(holder)[name] = new
        return
    if new is old or (new.device == old.device and new.data_ptr() == old.data_ptr() != 0):
        return  # it is there already
    if type(old).__name__ in _QUANTIZED and not isinstance(new, type(old)):
        carried = {k: v for k, v in old.__dict__.items() if k != "_is_hf_initialized"}
        made = cast(Any, type(old))(new, requires_grad=old.requires_grad, **carried)
        _torch.parameters(holder)[name] = made.to(new.device)
        return
    learns = old.requires_grad and (new.is_floating_point() or new.is_complex())
    _torch.parameters(holder)[name] = nn.Parameter(new, requires_grad=learns)

# SPDX-License-Identifier: Apache-2.0
"""Models whose weights rest in memory or in a folder: `cpu_offload`, `disk_offload` and
`dispatch_model` over `stowage.offload`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stowage._model.sizes import nbytes
from stowage._model.weights import Inventory, can_be_fetched
from stowage._ops.errors import InvalidArgument, raise_problems
from stowage._tensor.stowed import StowedTensor
from stowage._tiers.disk.engine import engine_of
from stowage._tiers.load import load_state_dict
from stowage._tiers.maps.budgets import disk_budget
from stowage._tiers.maps.module_sizes import holds
from stowage._tiers.offload import is_offloaded, offload
from stowage._tiers.places import device_problems
from stowage.compat.accelerate._attaching import add_hook_to_module
from stowage.compat.accelerate._files import OffloadedWeightsLoader
from stowage.compat.accelerate._maps import check_device_map, place_of
from stowage.compat.accelerate.hooks import (
    CpuOffload,
    Device,
    Names,
    UserCpuOffloadHook,
)

Folder = str | os.PathLike[str]


def cpu_offload(
    model: nn.Module,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    preload_module_classes: Iterable[str] | None = None,
) -> nn.Module:
    """Weights rest in memory and compute on `execution_device`, by default where the model is. On
    the CPU they stay as they are: nothing is copied. Values of `state_dict` are put in first.

    Raises InvalidArgument for a device that is not there, and for parameters without values."""
    where = _execution_device(model, execution_device)
    raise_problems("stowage.cpu_offload", device_problems(where))
    _take(model, state_dict or {}, "cpu_offload")
    if is_offloaded(model):
        return model
    model.to("cpu")
    if where.type != "cpu":
        to_device(model, where, {"": "cpu"}, None)
    return model


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: Device | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """The whole model goes to `execution_device` when it is called, after the model of
    `prev_module_hook` has left, and stays there until `offload()` of the hook that this returns
    with the model."""
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


def disk_offload(
    model: nn.Module,
    offload_dir: Folder,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Iterable[str] | None = None,
) -> nn.Module:
    """Weights rest in `offload_dir`, in the form of `stowage.save`, and compute on
    `execution_device`. In memory are at most an eighth of them, or the two largest; another budget
    is an argument of `stowage.offload`. A second call with the same folder does nothing.

    Raises InvalidArgument for a folder that holds anything but these weights."""
    where = _execution_device(model, execution_device)
    to_folder(model, Path(offload_dir), where, {"": "disk"})
    return model


def _execution_device(model: nn.Module, given: Device | None) -> torch.device:
    if given is not None:
        return torch.device(given)
    found = (held.tensor.device for held in Inventory(model).every if not held.tensor.is_meta)
    return next(found, torch.device("cpu"))


def _take(model: nn.Module, state: Mapping[str, torch.Tensor], where: str) -> None:
    """Puts values in; what `state` lacks stays as it is, and must have values."""
    if state:
        load_state_dict(model, state, strict=False)
    lost = [held.name for held in Inventory(model).every if held.tensor.is_meta]
    if lost:
        raise InvalidArgument(
            f"stowage.{where}: parameters and buffers must have values, these are on the meta "
            f"device: {', '.join(lost)}; load them with load_checkpoint_and_dispatch"
        )


def to_folder(
    model: nn.Module, folder: Path, device: torch.device, device_map: Mapping[str, Any]
) -> None:
    """Moves what `device_map` has on the disk to `folder`, where it is not there already; it
    computes on `device`."""
    engine = engine_of(model)
    if engine is not None and Path(engine.path).resolve().is_relative_to(folder.resolve()):
        return
    if device.type != "cpu":
        to_device(model.to("cpu"), device, device_map, folder)
        return
    places = _in_memory(model, device_map)
    raise_problems("stowage: a model that goes to a folder", _foreign(model))
    moved = [nbytes(held.tensor) for held in Inventory(model).every if held.name not in places]
    offload(model, ram=disk_budget(moved), folder=folder, device_map=places)


def to_device(
    model: nn.Module, home: torch.device, device_map: Mapping[str, Any], folder: Path | None
) -> None:
    """What `device_map` has on accelerators goes there; the rest computes on `home`, and comes from
    memory, or from `folder` where any of it is on the disk: as much as is "cpu" is in memory then.
    """
    if folder is not None:
        raise_problems("stowage: a model that goes to a folder", _foreign(model))
    placed = {n: d for n, d in _apart(model, device_map).items() if d not in ("cpu", "disk")}
    modules = dict(model.named_modules(remove_duplicate=False))
    placed = {n: d for n, d in placed.items() if n in modules or torch.device(d) != home}
    fetched, stay, in_memory = [], 0, 0
    for held in Inventory(model).every:
        size, device = nbytes(held.tensor), place_of(held.name, device_map)
        if device in ("cpu", "disk", None) and can_be_fetched(held):
            fetched.append(size)
            in_memory += size * (device == "cpu")
        elif device in ("cpu", "disk", None) or torch.device(device) == home:
            stay += size
    ring = disk_budget(fetched)
    budget = stay + ring if fetched else None
    ram = None if folder is None else in_memory + ring
    offload(
        model, ram=ram, folder=folder, device=home, accelerator=budget, device_map=placed or None
    )


def _apart(model: nn.Module, device_map: Mapping[str, Any]) -> dict[str, Any]:
    """The map without names inside others: what is around one stands as its other children."""
    found, left = {}, dict(device_map)
    while left:
        name, device = left.popitem()
        inside = [n for n in device_map if n != name and (not name or holds(name, n))]
        if not inside:
            found[name] = device
            continue
        for child, _ in model.get_submodule(name).named_children():
            path = f"{name}.{child}" if name else child
            if path not in device_map:
                left[path] = device
    return found


def _foreign(model: nn.Module) -> list[str]:
    """Weights that another library has quantized: a folder of ours has no place for them."""
    return [
        f"{held.name}: must not be quantized by {type(held.tensor).__module__.split('.')[0]}, is "
        f"{type(held.tensor).__name__}; stowage.stow(model, 'nf4') or 'int8' instead, or all in "
        "memory"
        for held in Inventory(model).parameters
        if type(held.tensor) not in (nn.Parameter, torch.Tensor)
        and not isinstance(held.tensor, StowedTensor)
    ]


def dispatch_model(
    model: nn.Module,
    device_map: Mapping[str, Device],
    main_device: Device | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: Folder | None = None,
    offload_index: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    skip_keys: Names = None,
    preload_module_classes: Iterable[str] | None = None,
    force_hooks: bool = False,
) -> nn.Module:
    """Puts each part of `model` where `device_map` says: on an accelerator, in memory ("cpu") or in
    the folder `offload_dir` ("disk"); the longest name around a tensor counts. Parts on several
    accelerators get their inputs there. The map becomes `model.hf_device_map`.

    Values of `state_dict`, and of the files that `offload_index` names, are put in first. Buffers
    stay in memory. Raises InvalidArgument, with nothing moved, for a map that leaves tensors out, a
    disk without a folder, a device that is not there, or parameters without values."""
    check_device_map(model, device_map)
    accelerators = accelerators_of(device_map)
    on_disk = "disk" in device_map.values()
    if on_disk and offload_dir is None and offload_index is None:
        raise InvalidArgument(
            "stowage.dispatch_model: offload_dir must be given for what is on the disk, got None"
        )
    home = torch.device((accelerators or ["cpu"])[0] if main_device is None else main_device)
    problems = [problem for d in (home, *accelerators) for problem in device_problems(d)]
    raise_problems("stowage.dispatch_model", list(dict.fromkeys(problems)))
    if is_offloaded(model) and getattr(model, "hf_device_map", device_map) != device_map:
        raise InvalidArgument(
            "stowage.dispatch_model: the model must not be dispatched by another map already, "
            "remove_hook_from_module(model) first"
        )
    state = dict(state_dict or {})
    if offload_index is not None:
        loader = OffloadedWeightsLoader(state, offload_dir, offload_index)
        missing = {n for h in Inventory(model).every if h.tensor.is_meta for n in h.names}
        state.update({name: loader[name] for name in missing if name in loader})
    _take(model, state, "dispatch_model")
    folder = Path(offload_dir) if on_disk and offload_dir is not None else None
    if len(accelerators) == len(set(device_map.values())) == 1:
        model.to(accelerators[0])
    elif not is_offloaded(model) and accelerators:
        to_device(model.to("cpu"), home, device_map, folder)
    elif not is_offloaded(model) and folder is not None:
        to_folder(model, folder, home, device_map)
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]
    return model


def _in_memory(model: nn.Module, device_map: Mapping[str, Any]) -> dict[str, str]:
    """The parameters that are not on the disk. Of one with several names and places the memory
    counts."""
    places: dict[str, str] = {}
    for held in Inventory(model).parameters:
        devices = {place_of(name, device_map) for name in held.names}
        if devices == {"disk"}:
            continue
        if "disk" in devices:
            text = f"stowage: {' and '.join(held.names)} are one tensor and stay in memory"
            warnings.warn(text, UserWarning, stacklevel=4)
        places.update(dict.fromkeys(held.names, "ram"))
    return places


def accelerators_of(device_map: Mapping[str, Any]) -> list[Any]:
    """The accelerators of a map, in its order."""
    every = (d for d in device_map.values() if d != "disk" and torch.device(d).type != "cpu")
    return list(dict.fromkeys(every))

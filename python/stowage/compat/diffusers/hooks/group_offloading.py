# SPDX-License-Identifier: Apache-2.0
"""`diffusers.hooks.group_offloading` over `stowage.offload`: weights stay in the module and are
fetched when they are used, in the order that is learnt from use. Groups only say how much may be
in memory at a time."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from stowage._model.sizes import memory, nbytes
from stowage._model.weights import Inventory, can_be_fetched
from stowage._ops.errors import InvalidArgument, raise_problems
from stowage._ops.memory import octets
from stowage._tensor.stowed import StowedTensor
from stowage._tiers.maps.budgets import disk_budget
from stowage._tiers.maps.module_sizes import largest_group
from stowage._tiers.offload import is_offloaded, offload, onload
from stowage._tiers.places import device_problems
from stowage.compat.diffusers.hooks._registry import Mark, mark_of, remove_mark, set_mark

_GROUP_OFFLOADING = "group_offloading"
Device = str | torch.device


class GroupOffloadingType(StrEnum):
    """What a group is."""

    BLOCK_LEVEL = "block_level"
    LEAF_LEVEL = "leaf_level"


@dataclass
class GroupOffloadingConfig:
    """The arguments of `apply_group_offloading`."""

    onload_device: torch.device
    offload_device: torch.device
    offload_type: GroupOffloadingType
    non_blocking: bool = False
    record_stream: bool = False
    low_cpu_mem_usage: bool = False
    num_blocks_per_group: int | None = None
    offload_to_disk_path: str | os.PathLike[str] | None = None
    stream: Any = None
    block_modules: list[str] | None = None
    exclude_kwargs: list[str] | None = None
    module_prefix: str = ""


class _ToldDiffusers:
    """What diffusers' own functions may know of how a module is offloaded."""

    def __init__(self, onload_device: torch.device) -> None:
        self.onload_device = onload_device

    @property
    def offload_type(self) -> NoReturn:
        """Asked for by diffusers to offload the module again, in its own way."""
        raise InvalidArgument(
            "stowage: a module that stowage has offloaded must be changed inside "
            "stowage.compat.diffusers.patched(); its weights are in memory now, call "
            "apply_group_offloading again"
        )


class GroupOffloadingHook(Mark):
    """Says that a module is offloaded, and how. Its removal fetches the weights back."""

    def __init__(self, config: GroupOffloadingConfig) -> None:
        self.given, self.config = config, _ToldDiffusers(config.onload_device)

    def deinitalize_hook(self, module: nn.Module) -> nn.Module:
        if is_offloaded(module):
            onload(module)
        return module


def apply_group_offloading(
    module: nn.Module,
    onload_device: Device,
    offload_device: Device = torch.device("cpu"),  # noqa: B008
    offload_type: str | GroupOffloadingType = "block_level",
    num_blocks_per_group: int | None = None,
    non_blocking: bool = False,
    use_stream: bool = False,
    record_stream: bool = False,
    low_cpu_mem_usage: bool = False,
    offload_to_disk_path: str | os.PathLike[str] | None = None,
    block_modules: Iterable[str] | None = None,
    exclude_kwargs: Iterable[str] | None = None,
) -> None:
    """Lets the weights of `module` rest in memory, or in a folder of its own below
    `offload_to_disk_path`, and compute on `onload_device`. On the CPU without a folder nothing is
    moved. With one, at most two groups are in memory: a group is the largest layer, or the largest
    `num_blocks_per_group` neighbours in a list of modules (in `block_modules`, where given), and
    never less than an eighth of all. A second call does what a first would do now.

    `use_stream` is how it always works; `non_blocking`, `record_stream`, `low_cpu_mem_usage` and
    `exclude_kwargs` have no effect. Raises InvalidArgument, with nothing moved, for arguments that
    contradict each other, a device that is not there and a module that is offloaded otherwise.
    """
    try:
        kind = GroupOffloadingType(offload_type)
    except ValueError:
        raise InvalidArgument(
            f"stowage: offload_type must be block_level or leaf_level, got {offload_type!r}"
        ) from None
    blocks = getattr(module, "_group_offload_block_modules", None)
    config = GroupOffloadingConfig(
        torch.device(onload_device),
        torch.device(offload_device),
        kind,
        non_blocking,
        record_stream,
        low_cpu_mem_usage,
        num_blocks_per_group,
        offload_to_disk_path,
        block_modules=list(blocks or ()) or None if block_modules is None else list(block_modules),
        exclude_kwargs=None if exclude_kwargs is None else list(exclude_kwargs),
    )
    raise_problems("stowage.apply_group_offloading", _problems(module, config, use_stream))
    _remove_group_offloading(module)
    _apply(module, config)


def _problems(module: nn.Module, config: GroupOffloadingConfig, use_stream: bool) -> list[str]:
    problems = device_problems(config.onload_device)
    if config.offload_device.type != "cpu":
        problems.append(f"offload_device must be cpu, got {config.offload_device}")
    if config.record_stream and not use_stream:
        problems.append("record_stream must be False when `use_stream=False`, got True")
    blocks = config.num_blocks_per_group
    if config.offload_type is GroupOffloadingType.BLOCK_LEVEL and (blocks is None or blocks < 1):
        problems.append(
            "num_blocks_per_group must be provided when using offload_type='block_level', 1 or "
            f"more, got {blocks}"
        )
    if is_offloaded(module) and mark_of(module, _GROUP_OFFLOADING) is None:
        problems.append("the module must not be offloaded by stowage.offload, onload it first")
    for path, part in module.named_modules():
        if type(getattr(part, "_hf_hook", None)).__name__ in ("AlignDevicesHook", "CpuOffload"):
            problems.append(f"{path or 'the module'}: must have no offloading hook of accelerate")
        mark = mark_of(part, _GROUP_OFFLOADING)
        if mark is not None and not isinstance(mark, GroupOffloadingHook):
            problems.append(f"{path or 'the module'}: is offloaded by diffusers itself already")
    lost = [held.name for held in Inventory(module).every if held.tensor.is_meta]
    if lost:
        problems.append(f"parameters must have values, {', '.join(lost)} are on the meta device")
    return problems


def _apply(module: nn.Module, config: GroupOffloadingConfig) -> None:
    folder, ram, device = None, None, config.onload_device
    fetched = [nbytes(held.tensor) for held in Inventory(module).every if can_be_fetched(held)]
    if config.offload_to_disk_path is not None:
        folder = Path(config.offload_to_disk_path, _folder_name(module))
        ram = _budget(module, config, fetched)
    if device.type != "cpu":
        module.to("cpu")
        stay = sum(nbytes(held.tensor) for held in Inventory(module).every) - sum(fetched)
        room = stay + _budget(module, config, fetched) if fetched else None
        offload(module, ram=ram, folder=folder, device=device, accelerator=room)
    elif folder is not None:
        offload(module, ram=ram, folder=folder)
    _mark(module, config)


def _mark(module: nn.Module, config: GroupOffloadingConfig) -> None:
    for part in module.modules():
        set_mark(part, _GROUP_OFFLOADING, GroupOffloadingHook(config))


def _budget(module: nn.Module, config: GroupOffloadingConfig, fetched: list[int]) -> int:
    """Bytes for two groups."""
    least = disk_budget(fetched)
    if config.offload_type is GroupOffloadingType.LEAF_LEVEL:
        return least
    group = largest_group(module, config.num_blocks_per_group or 1, config.block_modules)
    return max(least, 2 * group)


def _folder_name(module: nn.Module) -> str:
    """Of the weights, by names, forms and bytes: other models have other folders."""
    digest = hashlib.sha256()
    for held in Inventory(module).written:
        tensor = held.tensor
        storage = tensor.resting if isinstance(tensor, StowedTensor) else ""
        facts = (held.names, tuple(tensor.shape), str(tensor.dtype), str(storage))
        digest.update(repr(facts).encode())
        for part in memory(tensor):
            if part.numel():
                digest.update(memoryview(octets(part).numpy()))  # type: ignore[arg-type]
    return f"{type(module).__name__}-{digest.hexdigest()[:16]}"


def _remove_group_offloading(module: nn.Module) -> None:
    if mark_of(module, _GROUP_OFFLOADING) is not None and is_offloaded(module):
        onload(module)
    for part in module.modules():
        remove_mark(part, _GROUP_OFFLOADING)


def _get_top_level_group_offload_hook(module: nn.Module) -> Any:
    found = (mark_of(part, _GROUP_OFFLOADING) for part in module.modules())
    return next((mark for mark in found if mark is not None), None)


def _is_group_offload_enabled(module: nn.Module) -> bool:
    """Whether `module`, or a part of it, is offloaded."""
    return _get_top_level_group_offload_hook(module) is not None


def _get_group_onload_device(module: nn.Module) -> torch.device:
    """Where it computes. Raises ValueError where it is not offloaded."""
    mark = _get_top_level_group_offload_hook(module)
    if mark is None:
        raise InvalidArgument("stowage: the module must be group offloaded, is not")
    device: torch.device = mark.config.onload_device
    return device


def _maybe_remove_and_reapply_group_offloading(module: nn.Module) -> None:
    """Marks what was added to an offloaded module. Its weights need nothing: those that were
    changed have left the folder, new ones are in memory."""
    mark = _get_top_level_group_offload_hook(module)
    if isinstance(mark, GroupOffloadingHook):
        _mark(module, replace(mark.given))

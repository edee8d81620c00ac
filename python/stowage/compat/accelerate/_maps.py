# SPDX-License-Identifier: Apache-2.0
"""Sizes, limits and device maps under accelerate's names and arguments."""

from __future__ import annotations

import math
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from stowage._ops.errors import InvalidArgument
from stowage._tiers.maps import budgets
from stowage._tiers.maps.budgets import Device, Limits
from stowage._tiers.maps.first_fit import first_fit
from stowage._tiers.maps.module_sizes import (
    Dtype,
    Unit,
    dtype_bytes,
    holds,
    largest_layers,
    leaves,
    module_sizes,
    retie,
    tied_names,
)

Names = Iterable[str] | str | None
Dtypes = Mapping[str, Dtype] | None
Sizes = Mapping[Device, int | str]
_UNITS = {"GIB": 2**30, "MIB": 2**20, "KIB": 2**10, "GB": 10**9, "MB": 10**6, "KB": 10**3}
_SIZE = re.compile(r"\s*([0-9.]+(?:[eE][0-9]+)?)\s*([KMG](?:iB|IB|ib|Ib|B|b))\s*", re.IGNORECASE)


def convert_file_size_to_int(size: int | str) -> int:
    """Bytes of "5GB", "1.5GiB", "8Gb" (bits) or of an int. Raises ValueError for anything else."""
    if isinstance(size, int) and size >= 0:
        return size
    found = _SIZE.fullmatch(size) if isinstance(size, str) else None
    try:
        number = float(found[1]) if found else math.nan
    except ValueError:
        number = math.nan
    if found is None or not math.isfinite(number):
        raise InvalidArgument(
            f"stowage: size must be a number of bytes or a text such as '5.0GB', got {size!r}; it "
            "is not in a valid format"
        )
    total = int(number * _UNITS[found[2].upper()])
    in_bits = found[2].endswith("b") and len(found[2]) == 2
    return total // 8 if in_bits else total


def _bytes(given: Sizes | None) -> Limits | None:
    if given is None:
        return None
    return {device: convert_file_size_to_int(size) for device, size in given.items()}


def dtype_byte_size(dtype: Any) -> float:
    """Bytes of one value of `dtype`; 1/8 for a bool. Raises ValueError for what is no dtype."""
    return dtype_bytes(dtype)


def compute_module_sizes(
    model: nn.Module,
    dtype: Dtype | None = None,
    special_dtypes: Dtypes = None,
    buffers_only: bool = False,
) -> defaultdict[str, int]:
    """Bytes of each part of `model` by dotted name, of all of it under ""."""
    return module_sizes(model, dtype, special_dtypes, buffers_only=buffers_only)


def compute_module_total_buffer_size(
    model: nn.Module, dtype: Dtype | None = None, special_dtypes: Dtypes = None
) -> int:
    """Bytes of all buffers."""
    return module_sizes(model, dtype, special_dtypes, buffers_only=True).get("", 0)


def get_module_leaves(module_sizes: Mapping[str, int]) -> list[str]:
    """The names that no other name is below."""
    return leaves(module_sizes)


def get_max_layer_size(
    modules: list[Unit], module_sizes: Mapping[str, int], no_split_module_classes: Names
) -> tuple[int, list[str]]:
    """Bytes of the largest layer, and the names of those of that size."""
    return largest_layers(modules, module_sizes, budgets.names(no_split_module_classes))


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Bytes of the model, and what `get_max_layer_size` says of it."""
    sizes = module_sizes(model)
    whole = budgets.names(getattr(model, "_no_split_modules", None))
    units: list[Unit] = [
        *model.named_parameters(recurse=False),
        *model.named_children(),
        *model.named_buffers(recurse=False),
    ]
    return sizes[""], largest_layers(units, sizes, whole)


def get_max_memory(max_memory: Sizes | None = None) -> dict[Device, int]:
    """Bytes for each device, accelerators first: those given, or those that are free."""
    return budgets.max_memory(_bytes(max_memory))


def get_balanced_memory(
    model: nn.Module,
    max_memory: Sizes | None = None,
    no_split_module_classes: Names = None,
    dtype: Dtype | None = None,
    special_dtypes: Dtypes = None,
    low_zero: bool = False,
) -> dict[Device, int]:
    """Limits that spread `model` evenly, for `infer_auto_device_map`."""
    return budgets.balanced(
        model,
        _bytes(max_memory),
        no_split_module_classes,
        dtype,
        special_dtypes,
        low_zero=low_zero,
    )


def get_module_size_with_ties(
    tied_params: Sequence[str],
    module_size: int,
    module_sizes: Mapping[str, int],
    modules_to_treat: Sequence[Unit],
) -> tuple[int, list[str], list[Any]]:
    """Bytes of a module with the parts that hold `tied_params`, the names of these and themselves.
    A name that no part holds is left out; the bytes of a part count once."""
    found = [
        (param, unit)
        for param in tied_params
        if (unit := next((u for u in modules_to_treat if holds(u[0], param)), None)) is not None
    ]
    size = module_size + sum(module_sizes[name] for name in {unit[0] for _, unit in found})
    size -= sum(module_sizes[param] for param in {param for param, _ in found})
    return size, [unit[0] for _, unit in found], [unit[1] for _, unit in found]


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Sizes | None = None,
    no_split_module_classes: Names = None,
    dtype: Dtype | None = None,
    special_dtypes: Dtypes = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, Device]:
    """A device for each part of `model`, filled one after the other. See docs/compat.md for where
    the result differs from accelerate's."""
    found = first_fit(
        model,
        _bytes(max_memory),
        no_split_module_classes,
        dtype,
        special_dtypes,
        verbose=verbose,
        offload_buffers=offload_buffers,
        fallback=fallback_allocation,
    )
    return clean_device_map(found) if clean_result else found


def clean_device_map(device_map: dict[str, Any], module_name: str = "") -> dict[str, Any]:
    """Merges, in place, the names of a module whose parts are all on one device."""
    prefix = f"{module_name}." if module_name else ""
    inner = [name for name in device_map if name.startswith(prefix)]
    if len(inner) > 1 and len({device_map[name] for name in inner}) == 1:
        device = device_map[inner[0]]
        for name in inner:
            del device_map[name]
        device_map[module_name] = device
        return device_map
    nested = [name for name in inner if "." in name[len(prefix) :]]
    for child in dict.fromkeys(prefix + n[len(prefix) :].split(".")[0] for n in nested):
        clean_device_map(device_map, child)
    return device_map


def check_device_map(model: nn.Module, device_map: Mapping[str, Any]) -> None:
    """Raises ValueError for parameters and persistent buffers that `device_map` has no device for;
    warns of names that are no part of the model."""
    known = {path for path, _ in model.named_modules(remove_duplicate=False)}
    known |= {name for name, _ in model.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    unknown = [name for name in device_map if name not in known]
    if unknown:
        text = (
            "stowage: device_map must name parts of the model, these device_map keys do not match "
            f"any submodules: {', '.join(unknown)}"
        )
        warnings.warn(text, UserWarning, stacklevel=2)
    missing = [
        name
        for name in model.state_dict()
        if not any(at == "" or holds(at, name) for at in device_map)
    ]
    if missing:
        raise InvalidArgument(
            "stowage: device_map must give a device for each parameter and buffer, it has none "
            f"for: {', '.join(missing)}"
        )


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """The names of each parameter that has several, sorted."""
    return tied_names(model)


def retie_parameters(model: nn.Module, tied_params: Iterable[Sequence[str]]) -> None:
    """Makes the names of each group one parameter again: the first one that has values."""
    retie(model, tied_params)


def check_tied_parameters_on_same_device(
    tied_params: Iterable[Sequence[str]], device_map: Mapping[str, Any]
) -> None:
    """Warns of groups of names that `device_map` has on several devices."""
    for group in tied_params:
        devices = {name: place_of(name, device_map) for name in group}
        if len(set(devices.values())) > 1:
            text = f"stowage: tied parameters must be on one device, are on several: {devices}"
            warnings.warn(text, UserWarning, stacklevel=2)


def place_of(name: str, device_map: Mapping[str, Any]) -> Any:
    """The device of the longest name in `device_map` that is around a tensor's; None for none."""
    around = [at for at in device_map if at == "" or holds(at, name)]
    return device_map[max(around, key=len)] if around else None


def same_device(first: torch.device, second: torch.device) -> bool:
    """Whether both are one device: "cuda" is "cuda:0"."""
    if first.type != second.type or first.type == "cpu":
        return first.type == second.type
    return (first.index or 0) == (second.index or 0)

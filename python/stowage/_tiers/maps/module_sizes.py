# SPDX-License-Identifier: Apache-2.0
"""How many bytes each part of a model takes, by dotted names, as it is or in other dtypes, and
together with the parts that share a parameter with it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from stowage._model.sizes import nbytes
from stowage._model.weights import Inventory
from stowage._ops.errors import InvalidArgument
from stowage._tensor.stowed import StowedTensor

Dtype = torch.dtype | str
Node = nn.Module | torch.Tensor
Unit = tuple[str, Node]  # a part of a model and its dotted name

_NAMED = {"int2": 1 / 4, "int4": 1 / 2, "fp8": 1}  # dtypes that some libraries have and torch lacks


def dtype_bytes(dtype: Any) -> float:
    """Bytes of one value of `dtype`: a torch dtype, or an enumeration of int2, int4 and fp8. A bool
    counts as one bit, as in accelerate. Raises InvalidArgument for anything else."""
    if dtype == torch.bool:
        return 1 / 8
    if isinstance(dtype, torch.dtype):
        bits = re.search(r"int([1-7])$", str(dtype))
        return int(bits[1]) / 8 if bits else dtype.itemsize
    value = getattr(dtype, "value", dtype)
    if value not in _NAMED:
        raise InvalidArgument(f"stowage: dtype must be a dtype with a size, got {dtype!r}")
    return _NAMED[value]


def torch_dtype(given: Any) -> Any:
    """The dtype that "float16" or "torch.float16" names; others as they are."""
    if not isinstance(given, str):
        return given
    found = getattr(torch, given.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise InvalidArgument(f"stowage: dtype must name a dtype of torch, got {given!r}")
    return found


def module_sizes(
    model: nn.Module,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    *,
    buffers_only: bool = False,
) -> defaultdict[str, int]:
    """Bytes of `model` under "" and of each part under its dotted name; a tied tensor counts under
    its first name. Floating values count in `dtype` where that is narrower, tensors that
    `special_dtypes` names in the dtype that it gives, resting weights as they rest."""
    wanted = None if dtype is None else dtype_bytes(torch_dtype(dtype))
    special = {name: dtype_bytes(torch_dtype(d)) for name, d in (special_dtypes or {}).items()}
    sizes: defaultdict[str, int] = defaultdict(int)
    for name, tensor in _tensors(model, buffers_only):
        if name in special and not isinstance(tensor, StowedTensor):
            size = int(tensor.numel() * special[name])
        else:
            size = _bytes_in(tensor, wanted)
        parts = name.split(".")
        for end in range(len(parts) + 1):
            sizes[".".join(parts[:end])] += size
    return sizes


def _tensors(model: nn.Module, buffers_only: bool) -> Iterator[tuple[str, torch.Tensor]]:
    if not buffers_only:
        yield from model.named_parameters()
    yield from model.named_buffers()


def _bytes_in(tensor: torch.Tensor, wanted: float | None) -> int:
    if wanted is None or isinstance(tensor, StowedTensor) or not tensor.is_floating_point():
        return nbytes(tensor)
    return int(tensor.numel() * min(wanted, tensor.dtype.itemsize))


def largest_layers(
    units: Sequence[Unit], sizes: Mapping[str, int], whole: Container[str]
) -> tuple[int, list[str]]:
    """The most bytes that one layer among `units` takes, and the names of those that take them. A
    layer has no children, or is of a class that `whole` names."""
    most, names = 0, []
    for name, _ in _layers(units, whole):
        size = sizes[name]
        if size > most:
            most, names = size, [name]
        elif size == most:
            names.append(name)
    return most, names


def _layers(units: Sequence[Unit], whole: Container[str]) -> Iterator[Unit]:
    for name, node in units:
        inner = children(node, whole)
        if inner:
            yield from _layers([(f"{name}.{child}", part) for child, part in inner], whole)
        else:
            yield name, node


def children(node: Node, whole: Container[str]) -> list[tuple[str, nn.Module]]:
    """The modules that a part can be split into: none of a tensor, or of a class in `whole`."""
    if isinstance(node, torch.Tensor) or type(node).__name__ in whole:
        return []
    return list(node.named_children())


def leaves(sizes: Mapping[str, int]) -> list[str]:
    """The names that no other name is below."""
    parents = {name.rpartition(".")[0] for name in sizes if "." in name}
    return [name for name in sizes if name and name not in parents]


def largest_group(model: nn.Module, count: int, blocks: Container[str] | None = None) -> int:
    """The most bytes of `count` neighbours in a list or sequence of modules that `model`, or one of
    the children that `blocks` names, holds; or of one such child that is no list."""
    most = 0
    for name, child in model.named_children():
        if blocks is not None and name not in blocks:
            continue
        if isinstance(child, nn.ModuleList | nn.Sequential):
            sizes = [nbytes(block) for block in child]
            runs = (sum(sizes[i : i + count]) for i in range(len(sizes)))
            most = max(most, *runs, 0)
        elif blocks is not None:
            most = max(most, largest_group(child, count), nbytes(child))
    return most


def tied_names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several, sorted; the groups in the model's order."""
    return [sorted(held.names) for held in Inventory(model).parameters if len(held.names) > 1]


def holds(unit: str, name: str) -> bool:
    """Whether the tensor `name` is the part `unit`, or in it."""
    return name == unit or name.startswith(unit + ".")


def tied_outside(unit: Unit, others: Iterable[Unit], ties: Sequence[Sequence[str]]) -> list[Unit]:
    """Those of `others` that share a parameter with `unit`, or with one that does, and so on."""
    left, found, edge = list(others), [], [unit]
    while edge:
        name = edge.pop(0)[0]
        shared = [n for group in ties if any(holds(name, n) for n in group) for n in group]
        near = [u for u in left if u is not unit and any(holds(u[0], n) for n in shared)]
        left = [u for u in left if all(u is not n for n in near)]
        found += near
        edge += near
    return found


def size_with_ties(unit: Unit, tied: Iterable[Unit], sizes: Mapping[str, int]) -> int:
    """Bytes of some parts together. A tensor that they share counts once: `sizes` has it under its
    first name only."""
    return sum(sizes[name] for name in {unit[0], *(name for name, _ in tied)})


def retie(model: nn.Module, groups: Iterable[Sequence[str]]) -> None:
    """Makes the names of each group one parameter again: the first that has values, or the first
    where none has."""
    for group in groups:
        found = [(*_holder(model, name), name) for name in group]
        tensors = [getattr(module, attribute) for module, attribute, _ in found]
        chosen = next((t for t in tensors if not t.is_meta), tensors[0] if tensors else None)
        for module, attribute, _ in found:
            if getattr(module, attribute) is not chosen:
                setattr(module, attribute, chosen)


def _holder(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute

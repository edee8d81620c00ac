# SPDX-License-Identifier: Apache-2.0
"""Files with matrices of each expert as transformers' models, which have those of a layer in one
parameter. Which names mean the same, and what lies under what, the conversion mapping of
transformers says, of each model."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from stowage._files.names import Entry
from stowage._files.renames import Rename, Renaming
from stowage._files.sources import FileSource
from stowage._files.stacks import StackPlace, storage_of
from stowage._ops.errors import raise_problems
from stowage._ops.storage import Storage

# Its operations by name and dimension, where a stack has the matrices of one pattern, and where
# those of several lie under one another.
_STACKS = ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])


def adopt(source: FileSource, model: nn.Module, rename: Rename | None) -> dict[str, str]:
    """Further names for a model of transformers: what it calls tensors whose names, after `rename`,
    it does not have. Entries of experts that it has in a stack get their places there.

    Raises InvalidArgument for experts that cannot lie in one stack, with all reasons.
    """
    transforms = _transforms(model)
    if not transforms:
        return {}
    new_name, known = Renaming(rename), _shapes(model)
    names: dict[str, str] = {}
    stacks: dict[str, _Stack] = {}
    for entry in source.entries.values():
        name = new_name(entry.name)
        if name is None or name in known:
            continue
        new, transform, pattern, expert = _converted(name, transforms)
        if transform is not None and new in known and len(known[new]) == 3:
            stack = stacks.setdefault(new, _Stack(new, known[new][0], transform.source_patterns))
            stack.add(entry, pattern, expert)
        elif transform is None and new in known:
            names[name] = new
    whole = {new_name(name) for name in source.entries} & stacks.keys()
    problems = [
        f"{name}: must be in the file once, is there whole and by experts" for name in whole
    ]
    placed: dict[str, Entry] = {}
    for stack in stacks.values():
        placed.update(stack.placed(problems))
    raise_problems(f"stowage.load: {source.where}", problems)
    source.entries = {name: placed.get(name, entry) for name, entry in source.entries.items()}
    return names


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    every: list[tuple[str, torch.Tensor]] = [*model.named_parameters(remove_duplicate=False)]
    every += model.named_buffers(remove_duplicate=False)
    return {name: () if is_lazy(tensor) else tuple(tensor.shape) for name, tensor in every}


def _transforms(model: nn.Module) -> list[Any]:
    """Of a model of transformers 5; else none. The package is there if the model is."""
    package = sys.modules.get("transformers")
    if package is None or not isinstance(model, getattr(package, "PreTrainedModel", ())):
        return []
    try:
        mapping = importlib.import_module("transformers.conversion_mapping")
    except ImportError:
        return []
    found: list[Any] = mapping.get_model_conversion_mapping(model, add_legacy=False)
    return found


def _converted(name: str, transforms: Sequence[Any]) -> tuple[str, Any, int, int]:
    """The model's name; and of a matrix in a stack who put it there, which of its patterns the name
    has, and the number of the expert."""
    for transform in transforms:
        if not hasattr(transform, "operations"):
            name, _ = transform.rename_source_key(name)
    for transform in transforms:
        if not hasattr(transform, "operations"):
            continue
        new, matched = transform.rename_source_key(name)
        if matched is None:
            continue
        steps = [(type(step).__name__, getattr(step, "dim", None)) for step in transform.operations]
        number = re.search(re.escape(matched).replace(r"\*", r"(\d+)"), name)
        if steps not in _STACKS or number is None or not number.groups():
            break
        return new, transform, transform.source_patterns.index(matched), int(number[1])
    return name, None, 0, 0


class _Stack:
    """The matrices of one parameter [E, O, K]."""

    def __init__(self, name: str, experts: int, patterns: Sequence[str]) -> None:
        self._name, self._experts, self._patterns = name, experts, patterns
        self._found: dict[tuple[int, int], Entry] = {}

    def add(self, entry: Entry, pattern: int, expert: int) -> None:
        self._found[expert, pattern] = entry

    def placed(self, problems: list[str]) -> Mapping[str, Entry]:
        """The entries with their places, by name; none where there are `problems`."""
        patterns = range(len(self._patterns))
        wanted = [(expert, pattern) for expert in range(self._experts) for pattern in patterns]
        if missing := [which for which in wanted if which not in self._found]:
            expert, pattern = missing[0]
            problems.append(
                f"{self._name}: must have all of its {self._experts} experts in the file, has no "
                f"{self._patterns[pattern].replace('*', str(expert))}"
            )
            return {}
        if more := [entry for which, entry in self._found.items() if which not in wanted]:
            problems.append(f"{more[0].name}: must be of {self._experts} experts in {self._name}")
            return {}
        heads = [self._found[0, pattern] for pattern in patterns]
        for (_, pattern), entry in self._found.items():
            if why := _unlike(entry, heads[pattern], heads[0]):
                problems.append(f"{entry.name}: {why}, to lie in {self._name}")
                return {}
        rows = [head.shape[0] for head in heads]
        rests: Storage | None = None
        for head in heads:
            if head.storage is None:
                continue
            made = storage_of(head.storage, head.shape, len(heads) == 1)
            if isinstance(made, str):
                problems.append(
                    f"{head.name}: must rest so that it can lie in {self._name}, is {head.storage} "
                    f"{list(head.shape)}: {made}; `stowage convert` or `unpack` writes the file in "
                    "another form"
                )
                return {}
            rests = made
        shape = (self._experts, sum(rows), heads[0].shape[1])
        return {
            entry.name: replace(
                entry, place=StackPlace(self._name, shape, rests, expert, sum(rows[:pattern]))
            )
            for (expert, pattern), entry in self._found.items()
        }


def _unlike(entry: Entry, like: Entry, first: Entry) -> str:
    """Why a matrix cannot lie in a stack with others: `like` has its pattern, `first` is of all."""
    if len(entry.shape) != 2 or entry.shape != like.shape or entry.shape[1] != first.shape[1]:
        wanted = " and ".join(f"{each.name} {list(each.shape)}" for each in (like, first))
        return f"must have a shape like {wanted}, has {list(entry.shape)}"
    here, there = (_kind(each) for each in (entry, first))
    return "" if here == there else f"must rest as {first.name} does, {there}, is {here}"


def _kind(entry: Entry) -> str:
    works = "" if entry.compute is None else f" in {str(entry.compute).removeprefix('torch.')}"
    if entry.storage is not None:
        return f"{entry.storage}{works}"
    return f"plain {str(entry.dtype).removeprefix('torch.')}"

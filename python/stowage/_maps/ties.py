# SPDX-License-Identifier: Apache-2.0
"""Parameters that several names share, and what that means for where parts of a model go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from stowage._maps.sizes import Unit
from stowage._model.weights import parameters


def tied_names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several, sorted; the groups in the model's order."""
    return [sorted(held.names) for held in parameters(model) if len(held.names) > 1]


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


def tensor_at(model: nn.Module, name: str) -> torch.Tensor:
    """The parameter or buffer with a dotted name."""
    module, attribute = _holder(model, name)
    found: torch.Tensor = getattr(module, attribute)
    return found

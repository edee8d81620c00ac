# SPDX-License-Identifier: Apache-2.0
"""Activations that move to where a module computes: hooks before and after its forward. They are
plain objects under a name of ours, so that they are found again in copies of a model."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stowage._ops import _torch
from stowage._tensor.views import PACKED

_HOOK = "stowage.device"
_compiling = torch.compiler.is_compiling


def moved(tree: Any, device: torch.device) -> Any:
    """The same lists, tuples and mappings with plain tensors on `device`; anything else, and what
    has nothing to move, is the same object."""
    if isinstance(tree, Tensor):
        return tree if isinstance(tree, PACKED) or tree.device == device else tree.to(device)
    if isinstance(tree, list | tuple):
        new = [moved(item, device) for item in tree]
        if all(a is b for a, b in zip(new, tree, strict=True)):
            return tree
        return type(tree)(*new) if hasattr(tree, "_fields") else type(tree)(new)
    if isinstance(tree, Mapping):
        pairs = {key: moved(value, device) for key, value in tree.items()}
        if all(value is tree[key] for key, value in pairs.items()):
            return tree
        if type(tree) is dict:
            return pairs
        other: Any = copy.copy(tree)
        for key, value in pairs.items():
            other[key] = value
        return other
    return tree


def device_of(tree: Any) -> torch.device | None:
    """Where the first plain tensor is."""
    if isinstance(tree, Tensor):
        return None if isinstance(tree, PACKED) else tree.device
    items = tree.values() if isinstance(tree, Mapping) else tree
    if isinstance(tree, Mapping | list | tuple):
        for item in items:
            found = device_of(item)
            if found is not None:
                return found
    return None


class _Here(threading.local):
    def __init__(self) -> None:
        self.came: list[tuple[int, torch.device | None]] = []


_here = _Here()


class _Came:
    """Where the inputs of forwards that run were, of one module."""

    def __init__(self) -> None:
        self._traced: list[
            torch.device | None
        ] = []  # while a compiler follows, which has one thread

    def push(self, device: torch.device | None) -> None:
        if _compiling():
            self._traced.append(device)
        else:
            _here.came.append((id(self), device))

    def pop(self) -> torch.device | None:
        if _compiling():
            return self._traced.pop()
        while _here.came:
            owner, device = _here.came.pop()
            if owner == id(self):
                return device
        return None


class _Before:
    def __init__(self, device: torch.device, came: _Came | None) -> None:
        self.device, self._came = device, came

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._came is not None:
            self._came.push(device_of([args, kwargs]))
        return moved(args, self.device), moved(kwargs, self.device)


class _After:
    def __init__(self, came: _Came, only_to_cpu: bool) -> None:
        self._came, self._only_to_cpu = came, only_to_cpu

    def __call__(self, module: nn.Module, args: Any, result: Any) -> Any:
        device = self._came.pop()
        if device is None or (self._only_to_cpu and device.type != "cpu"):
            return None
        return moved(result, device)


def compute_on(module: nn.Module, device: torch.device, back: str) -> None:
    """Makes the inputs of `module` come to `device`. Its outputs go `back` to where the first of
    them was: "always", "cpu" (only where that was the CPU) or "never"."""
    came = None if back == "never" else _Came()
    pre: Any = _torch.pre_hooks(module)
    pre[_HOOK] = _Before(device, came)
    _torch.pre_hooks_with_kwargs(module)[_HOOK] = True
    if came is not None:
        post: Any = _torch.hooks(module)
        post[_HOOK] = _After(came, back == "cpu")
        _torch.hooks_always_called(module)[_HOOK] = True


def compute_anywhere(model: nn.Module) -> None:
    """Undoes `compute_on` in all of a model."""
    for module in model.modules():
        every: list[Any] = [
            _torch.pre_hooks(module),
            _torch.pre_hooks_with_kwargs(module),
            _torch.hooks(module),
            _torch.hooks_always_called(module),
        ]
        for hooks in every:
            hooks.pop(_HOOK, None)


def device_given(module: nn.Module) -> torch.device | None:
    """Where `compute_on` makes a module compute."""
    found: Any = _torch.pre_hooks(module).get(_HOOK)
    return None if found is None else found.device

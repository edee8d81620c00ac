# SPDX-License-Identifier: Apache-2.0
"""Input casts: hooks that give a module its inputs in the compute dtype of its stowed weight, and
where asked its outputs in the dtype that the inputs had."""

import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stowage._ops import _torch
from stowage._ops._torch import tree_leaves, tree_map_only
from stowage._tensor.stowed import StowedTensor
from stowage._tensor.views import PACKED

INPUT_CASTS = ("never", "compute", "restore")
_HOOK = "stowage.input_cast"  # as in _tensor/products/blocks.py
_compiling = torch.compiler.is_compiling


class _Given(NamedTuple):
    """A running forward whose outputs go back to the dtype of its first floating input."""

    module: int
    dtype: torch.dtype | None


class _Thread(threading.local):
    def __init__(self) -> None:
        self.running: list[_Given] = []


_here = _Thread()
_traced: list[_Given] = []  # while a compiler runs the hooks: it knows lists, not threads


def _running() -> list[_Given]:
    return _traced if _compiling() else _here.running


def _compute(module: nn.Module) -> torch.dtype | None:
    for parameter in _torch.parameters(module).values():
        if isinstance(parameter, StowedTensor):
            return parameter.dtype
    return None


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    def one(t: Tensor) -> Tensor:
        return t.to(dtype) if t.is_floating_point() and not isinstance(t, PACKED) else t

    return tree_map_only(Tensor, one, tree)


def _to_compute(module: nn.Module, args: Any, kwargs: Any) -> Any:
    dtype = _compute(module)
    return None if dtype is None else (_cast(args, dtype), _cast(kwargs, dtype))


def _note_and_cast(module: nn.Module, args: Any, kwargs: Any) -> Any:
    floats = (t.dtype for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor))
    given = next((dtype for dtype in floats if dtype.is_floating_point), None)
    _running().append(_Given(id(module), given))
    return _to_compute(module, args, kwargs)


def _restore(module: nn.Module, args: Any, result: Any) -> Any:
    running, given = _running(), None
    # What a KeyboardInterrupt left lies above; torch calls no hook after one.
    while running and given is None:
        last = running.pop()
        given = last if last.module == id(module) else None
    if given is None or given.dtype is None or result is None:
        return None
    return _cast(result, given.dtype)


def cast_inputs(module: nn.Module, how: str) -> None:
    """Gives `module` the hooks of one of INPUT_CASTS, in place of those it had. They are functions
    of this file: they are copied and pickled with it."""
    _torch.pre_hooks(module).pop(_HOOK, None)
    _torch.pre_hooks_with_kwargs(module).pop(_HOOK, None)
    _torch.hooks(module).pop(_HOOK, None)
    _torch.hooks_always_called(module).pop(_HOOK, None)
    if how == "never":
        return
    before = _to_compute if how == "compute" else _note_and_cast
    _torch.pre_hooks(module)[_HOOK] = before
    _torch.pre_hooks_with_kwargs(module)[_HOOK] = True
    if how == "restore":
        _torch.hooks(module)[_HOOK] = _restore
        _torch.hooks_always_called(module)[_HOOK] = True

# SPDX-License-Identifier: Apache-2.0
"""Blocks: a weight with exact=True that is used while a block's forward runs is widened once.

A pre-hook opens a scope, a forward hook that torch calls even after an exception closes it, and the
widened weights are in the scope: of one thread, never on a Parameter, looked up below autograd by
the memory and version of codes and scales. So graphs save codes, and a write is seen at once.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stowage._ops import _torch, library
from stowage._ops._torch import tree_leaves, tree_map_only
from stowage._ops.lenders import accelerator_of, fetched, lender_of
from stowage._ops.library import composite_forced
from stowage._tensor.stowed import VALUE_DTYPES, StowedTensor
from stowage._tensor.views import PACKED, StowedView, replay

# Under which the hooks stand in a module's dictionaries. Not torch's running numbers: those of an
# unpickled module may be given to another hook again, and a name finds the hook without a handle.
_HOOK = "stowage.block"
_functorch_active = _torch.functorch_active
_modes = _torch.len_torch_dispatch_stack
_compiling = torch.compiler.is_compiling


class _Widened:
    """A weight in its compute dtype. It keeps the parts, so that no others get their addresses."""

    def __init__(self, parts: Sequence[Tensor], versions: list[int], values: Tensor) -> None:
        self.parts, self.versions, self.values = parts, versions, values
        self.version = _torch.version(values)


class _Scope:
    """One running forward of a block."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self._parts: set[int] | None = None
        self.widened: dict[tuple[Any, ...], _Widened] = {}

    def contains(self, block: nn.Module) -> bool:
        """Whether `block` is this one, or a part of it."""
        if self._parts is None:
            self._parts = {id(part) for part in self.block.modules()}
        return id(block) in self._parts


class _Thread(threading.local):
    def __init__(self) -> None:
        self.scopes: list[_Scope] = []


_here = _Thread()


def widened(
    codes: Tensor, scales: Sequence[Tensor], storage: int, shape: Sequence[int], dtype: torch.dtype
) -> Tensor | None:
    """The weight in `dtype`, from the scope of a running block or made for it; None outside of
    blocks, and where something follows the ops (a transform, a mode, a compiler). Not to be written
    to, and not to be saved for backward."""
    if _compiling():
        return None
    scopes = _here.scopes
    if not scopes or type(codes) is not Tensor or _functorch_active() or _modes():
        return None
    if dtype not in VALUE_DTYPES or (dtype is torch.bfloat16 and composite_forced()):
        return None
    parts = (codes, *scales)
    try:
        versions = [_torch.version(part) for part in parts]
    except RuntimeError:  # made in inference_mode: a write to it could not be seen
        return None
    key = (*(part.data_ptr() for part in parts), storage, dtype, *shape)
    for scope in reversed(scopes):
        found = scope.widened.get(key)
        if found is not None:
            if found.versions == versions and found.version == _torch.version(found.values):
                return found.values
            del scope.widened[key]
    with torch.inference_mode(False):  # else it had no version
        values = library.dequantize(codes, scales, storage, list(shape), dtype)
    scopes[-1].widened[key] = _Widened(parts, versions, values)
    return values


def values(tree: Any) -> Any:
    """The same arguments with the values of every stowed tensor in its place: on the device of the
    plain ones, where the weights of its model are fetched there."""
    device = accelerator_of(tree_leaves(tree))
    return tree_map_only(PACKED, lambda t: _values(t, device), tree)


def _values(t: Any, device: torch.device | None) -> Tensor:
    weight = t._weight if isinstance(t, StowedView) else t
    if device is not None and lender_of(weight._parts()[0], device) is not None:
        return _fetched_values(t, weight, device)
    found = _of(weight) if weight._exact and _here.scopes else None
    if found is None:
        return t.dequantize()
    return replay(t._chain, found) if isinstance(t, StowedView) else found


def _fetched_values(t: Any, weight: StowedTensor, device: torch.device) -> Tensor:
    out = weight._dt if weight._dt in VALUE_DTYPES else torch.float32
    with fetched(weight._parts(), device) as (codes, *scales):
        dense = library.dequantize(codes, scales, weight._storage.key, weight.shape, out)
    dense = dense.to(weight._dt)
    return replay(t._chain, dense) if isinstance(t, StowedView) else dense


def _of(weight: StowedTensor) -> Tensor | None:
    codes, *scales = weight._parts()
    return widened(codes, scales, weight._storage.key, weight.shape, weight._dt)


# --- hooks ----------------------------------------------------------------------------------------


def _open(block: nn.Module, args: Any) -> None:
    if _compiling():
        return  # each op in the graph widens by itself
    scopes = _here.scopes
    while scopes and not scopes[-1].contains(block):
        scopes.pop()  # of an interrupted forward, after which torch calls no hook
    scopes.append(_Scope(block))


_open.__module__ = "stowage._compute.blocks"  # pickles name it


def _close(block: nn.Module, args: Any, result: Any) -> None:
    if _compiling():
        return
    scopes = _here.scopes
    if any(scope.block is block for scope in scopes):
        while scopes.pop().block is not block:
            pass


_close.__module__ = "stowage._compute.blocks"  # pickles name it


def _hooks(block: nn.Module) -> tuple[OrderedDict[Any, Any], OrderedDict[Any, Any]]:
    pre: Any = _torch.pre_hooks(block)
    return pre, _torch.hooks(block)


def mark(block: nn.Module) -> None:
    """Makes `block` one. The hooks are functions of this module: they are copied and pickled with
    it."""
    pre, post = _hooks(block)
    pre[_HOOK], post[_HOOK] = _open, _close
    pre.move_to_end(_HOOK, last=False)  # before hooks that may raise
    _torch.hooks_always_called(block)[_HOOK] = True


def unmark(block: nn.Module) -> None:
    for hooks in (*_hooks(block), _torch.hooks_always_called(block)):
        hooks.pop(_HOOK, None)


def is_block(module: nn.Module) -> bool:
    return _HOOK in _hooks(module)[0]

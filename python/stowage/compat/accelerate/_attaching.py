# SPDX-License-Identifier: Apache-2.0
"""How a hook gets around a module's forward: `add_hook_to_module` and its undoing.

The forward that is put in holds its module weakly and finds the class's own forward when it is
called. So nothing keeps a dropped model alive, copies and pickles are bound to the new module, and
a class that is swapped, or a graph that is edited, is what runs.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from typing import Any

import torch
from torch import nn

from stowage._tiers.offload import is_offloaded, onload


class ModelHook:
    """What runs before and after a module's forward. Unlike torch's hooks these run when `forward`
    is called directly too."""

    no_grad = False  # whether the forward runs without gradients

    def init_hook(self, module: nn.Module) -> nn.Module:
        """When the hook is attached."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Before the forward, with its arguments; returns those that it gets."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """After the forward; returns its result."""
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """When the hook is removed."""
        return module


class SequentialHook(ModelHook):
    """Several hooks as one: in their order, and removed in the opposite one."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    @property
    def no_grad(self) -> bool:  # type: ignore[override]
        """Whether any of the hooks wants it."""
        return any(hook.no_grad for hook in self.hooks)

    def init_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        for hook in reversed(self.hooks):
            module = hook.detach_hook(module)
        return module


_local = threading.local()


def _frames() -> list[dict[int, Any]]:
    frames: list[dict[int, Any]] = _local.__dict__.setdefault("frames", [{}])
    return frames


def frame() -> dict[int, Any]:
    """What hooks remember from before a forward until after it: of this call, in this thread."""
    return _frames()[-1]


class _Bound:
    """A forward, bound weakly to a module: with its hook, or the module's own."""

    def __init__(self, module: nn.Module, hooked: bool) -> None:
        self._module, self._hooked = weakref.ref(module), hooked

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._owner()
        if not self._hooked:
            return type(module).forward(module, *args, **kwargs)
        hook: ModelHook = module._hf_hook  # type: ignore[assignment]
        _frames().append({})
        try:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
            forward: Any = module._old_forward
            with torch.set_grad_enabled(torch.is_grad_enabled() and not hook.no_grad):
                output = forward(*args, **kwargs)
            return hook.post_forward(module, output)
        finally:
            _frames().pop()

    def _owner(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise ReferenceError("stowage: the module of this forward must be alive, is gone")
        return module

    @property
    def __name__(self) -> str:
        return "forward"

    @property
    def __signature__(self) -> inspect.Signature:
        module = self._owner()
        if self._hooked:
            return inspect.signature(module._old_forward)  # type: ignore[arg-type]
        own = inspect.signature(type(module).forward)
        return own.replace(parameters=list(own.parameters.values())[1:])

    def __deepcopy__(self, memo: dict[int, Any]) -> _Bound:
        module = self._owner()
        return _Bound(memo.get(id(module), module), self._hooked)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Bound, (self._owner(), self._hooked)


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Puts `hook` around the module's forward, in place of one that is there, or after it with
    `append`. Returns the module."""
    old = getattr(module, "_hf_hook", None)
    if append and old is not None:
        hook.init_hook(module)
        module.__dict__["_hf_hook"] = SequentialHook(old, hook)
        return module
    hook.init_hook(module)
    module.__dict__["_hf_hook"] = hook
    if "_old_forward" not in module.__dict__:
        own = module.__dict__.get("forward")  # somebody else's patch
        module.__dict__["_old_forward"] = _Bound(module, False) if own is None else own
        module.__dict__["forward"] = _Bound(module, True)
    return module


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Removes the hook of a module, and with `recurse` those of all below it; where the weights of
    the module were offloaded, they come back into memory. Returns the module."""
    if is_offloaded(module):
        onload(module)
    hook = module.__dict__.pop("_hf_hook", None)
    if hook is not None:
        hook.detach_hook(module)
        old = module.__dict__.pop("_old_forward")
        del module.__dict__["forward"]
        if not isinstance(old, _Bound):
            module.__dict__["forward"] = old
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """`remove_hook_from_module` of a module and all below it."""
    remove_hook_from_module(module, recurse=True)

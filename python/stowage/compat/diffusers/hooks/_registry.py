# SPDX-License-Identifier: Apache-2.0
"""Marks on modules that diffusers' own code asks for: `module._diffusers_hook.get_hook(name)`. In
its registries where it is imported, so that its other hooks have theirs; no forward is changed."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

_ATTRIBUTE = "_diffusers_hook"


class Mark:
    """What a registry holds under a name, with the methods that diffusers calls."""

    _is_stateful = False

    def deinitalize_hook(self, module: nn.Module) -> nn.Module:  # so spelled in diffusers
        """When the mark is removed by diffusers."""
        return module


class _Registry:
    """As much of a registry as marks need, where diffusers is not imported."""

    def __init__(self) -> None:
        self.hooks: dict[str, Any] = {}

    def get_hook(self, name: str) -> Any:
        return self.hooks.get(name)

    def remove_hook(self, name: str, recurse: bool = True) -> None:
        self.hooks.pop(name, None)


class _Reference:
    """The forward that stands when a mark is removed."""

    original_forward = None

    def __init__(self, forward: Any) -> None:
        self.forward = forward


def set_mark(module: nn.Module, name: str, mark: Mark) -> None:
    registry: Any = getattr(module, _ATTRIBUTE, None)
    if registry is None:
        theirs = sys.modules.get("diffusers.hooks.hooks")
        registry = _Registry() if theirs is None else theirs.HookRegistry(module)
        module.__dict__[_ATTRIBUTE] = registry
    if name not in registry.hooks and not isinstance(registry, _Registry):
        registry._hook_order.append(name)
        registry._fn_refs.append(_Reference(module.forward))
    registry.hooks[name] = mark


def mark_of(module: nn.Module, name: str) -> Any:
    registry: Any = getattr(module, _ATTRIBUTE, None)
    return None if registry is None else registry.get_hook(name)


def remove_mark(module: nn.Module, name: str) -> None:
    """Without a trace: an own `forward` that stood for the class's goes too."""
    registry: Any = getattr(module, _ATTRIBUTE, None)
    if registry is None or registry.get_hook(name) is None:
        return
    own = "forward" in module.__dict__
    registry.remove_hook(name, recurse=False)
    if not own:
        module.__dict__.pop("forward", None)

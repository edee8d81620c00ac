# SPDX-License-Identifier: Apache-2.0
"""What a model itself says of its parts: places that it wants in fp32, places that must not be cast
layer by layer, and the parts that PEFT put beside its layers."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from stowage._ops.errors import InvalidArgument


def _declared(module: nn.Module, attribute: str) -> list[str]:
    """The names or patterns that a class declares. A bare string is one of them; taken as a
    sequence it would be its letters."""
    found: Any = getattr(module, attribute, None)
    if isinstance(found, str):
        return [found]
    return [part for part in found if part] if isinstance(found, list | tuple | set) else []


class WidePlaces:
    """The places that a model wants in fp32: `_keep_in_fp32_modules` of transformers and
    diffusers, wherever in the model it is declared."""

    def __init__(self, model: nn.Module) -> None:
        self._patterns: list[re.Pattern[str]] = []
        for path, module in model.named_modules():
            for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
                for part in _declared(module, attribute):
                    inside = rf"{re.escape(path)}\.(?:.*\.)?" if path else r"(?:.*\.)?"
                    self._patterns.append(re.compile(rf"{inside}{re.escape(part)}(?:\.|$)"))

    def contain(self, name: str) -> bool:
        return any(pattern.match(name) for pattern in self._patterns)


class UncastPlaces:
    """The places that a model of diffusers keeps from layerwise casting:
    `_skip_layerwise_casting_patterns`, regular expressions that are searched for in the dotted
    paths of the modules below the one that declares them; a match takes all that is inside."""

    def __init__(self, model: nn.Module) -> None:
        self._declared: list[tuple[str, list[re.Pattern[str]]]] = []
        for path, module in model.named_modules():
            patterns = _declared(module, "_skip_layerwise_casting_patterns")
            if patterns:
                self._declared.append((path, [_compiled(p, module) for p in patterns]))

    def pattern_of(self, path: str) -> str:
        """The first pattern that takes the module at `path`; "" if none does."""
        for base, patterns in self._declared:
            if base and not path.startswith(f"{base}."):
                continue
            parts = path[len(base) :].strip(".").split(".")
            inside = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
            for pattern in patterns:
                if any(pattern.search(name) for name in inside):
                    return pattern.pattern
        return ""


def _compiled(pattern: str, module: nn.Module) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise InvalidArgument(
            f"stowage: _skip_layerwise_casting_patterns of {type(module).__name__} must be regular "
            f"expressions, got {pattern!r} ({error})"
        ) from None


def adapter_paths(model: nn.Module) -> frozenset[str]:
    """Paths of the modules that PEFT put beside a base layer: adapters, and trainable copies."""
    found: set[str] = set()
    for path, module in model.named_modules():
        names = tuple(getattr(module, "adapter_layer_names", None) or ())
        if hasattr(module, "original_module"):
            names += ("modules_to_save",)
        for name in names:
            part = getattr(module, name, None)
            if isinstance(part, nn.Module):
                base = f"{path}.{name}" if path else name
                found.update(f"{base}.{n}" if n else base for n, _ in part.named_modules())
    return frozenset(found)

# SPDX-License-Identifier: Apache-2.0
"""What can be known of a model before any rule is read: places that it wants in fp32, places that
must not be cast layer by layer, the parts that PEFT put beside its layers, and tensors that cannot
rest, which are told when the model is stowed, so that no later forward has to fail."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm

from stowage._model.weights import LAZY, Held, Site
from stowage._ops import _torch
from stowage._ops.errors import InvalidArgument
from stowage._ops.storage import Storage

# Scales of an 8-bit weight are worth their bytes from this rank on.
_LEAST_RANK = {"row": 2, "row2": 2, "block": 1, "block2": 2}


def _declared(module: nn.Module, attribute: str) -> list[str]:
    """The names or patterns that a class declares. A bare string is one of them; taken as a
    sequence it would be its letters."""
    found: Any = getattr(module, attribute, None)
    if isinstance(found, str):
        return [found]
    return [part for part in found if part] if isinstance(found, list | tuple | set) else []


def may_differ(model: nn.Module, attribute: str, name: str) -> bool:
    """Whether the model itself (transformers) says that this name may be in it alone, or in a file
    alone."""
    return any(re.search(pattern, name) for pattern in getattr(model, attribute, None) or ())


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


def cannot_rest(held: Held) -> str:
    """Why no rule can let this tensor rest; "" if one can."""
    tensor = held.tensor
    if isinstance(tensor, LAZY):
        return ""  # a problem to be told, not a reason to pass over it
    if not tensor.is_floating_point():
        return f"{str(tensor.dtype).removeprefix('torch.')} values"
    if _torch.in_flat_parameter(tensor):
        return "FullyShardedDataParallel keeps it in a flat parameter of its own"
    return next(filter(None, map(_forbidden, held.sites)), "")


def _forbidden(site: Site) -> str:
    """What the module that holds the tensor would do to it."""
    module, attribute = site.module, site.attribute
    if isinstance(module, torch.jit.ScriptModule):
        return "a scripted or traced module takes plain tensors only"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
        return "each forward writes it (max_norm)"
    if isinstance(module, _torch.NormBase) and attribute.startswith("running_"):
        return "a forward in training writes it (running statistics)"
    if attribute in _torch.buffers(module) and _iterates(module, attribute):
        return "a forward in training writes it (spectral norm)"
    return ""


def _iterates(module: nn.Module, buffer: str) -> bool:
    """Whether it is a vector of a power iteration, of the old or the new spectral norm."""
    if isinstance(module, _torch.SpectralNorm):
        return True
    hooks = _torch.pre_hooks(module).values()
    names = [hook.name for hook in hooks if isinstance(hook, SpectralNorm)]
    return buffer in {f"{name}_{vector}" for name in names for vector in "uv"}


def is_narrow(held: Held) -> bool:
    """Fewer than two dimensions: biases, norms, scalars."""
    return not isinstance(held.tensor, LAZY) and held.tensor.dim() < 2


def too_narrow(held: Held, storage: Storage) -> str:
    """Why `storage` is not for a tensor of so few dimensions; "" if it is."""
    if not is_narrow(held) or not storage.byte_codes:
        return ""
    if held.tensor.dim() >= _LEAST_RANK.get(storage.kind, 0):
        return ""
    return f"fewer than two dimensions: {storage.name} would have a scale for each value"

# SPDX-License-Identifier: Apache-2.0
"""`diffusers.hooks.layerwise_casting`: which layers of a module are cast is decided as diffusers
0.42 decides it, then `stowage.stow` does the work. No hook is attached to any module.

docs/compat.md lists what differs: biases keep their values, a second call with the same storage
does nothing, and what cannot be done is refused before anything changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from stowage._model.choice.selection import Rules
from stowage._model.declared import cannot_rest, is_narrow
from stowage._model.patterns import Predicate, names_around
from stowage._model.stow import stow
from stowage._model.weights import Inventory
from stowage._ops.errors import InvalidArgument
from stowage._tensor.casts import is_plain
from stowage._tensor.stowed import StowedTensor
from stowage.compat.diffusers.hooks._registry import Mark, mark_of

Patterns = str | Iterable[str]
Classes = str | type[nn.Module] | Iterable["str | type[nn.Module]"]

DEFAULT_SKIP_MODULES_PATTERN = ("pos_embed", "patch_embed", "norm", "^proj_in$", "^proj_out$")
LAYERS: tuple[type[nn.Module], ...] = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
    nn.Embedding,
)
STORAGES = {
    torch.float8_e4m3fn: "f8_e4m3",
    torch.float8_e5m2: "f8_e5m2",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
}


def apply_layerwise_casting(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: Patterns | None = "auto",
    skip_modules_classes: Classes | None = None,
    non_blocking: bool = False,
    *,
    exact: bool = False,
) -> None:
    """Lets the weights of the Linear, Embedding and Conv layers of `module` rest as a plain cast to
    `storage_dtype` and compute in `compute_dtype`; their biases get `compute_dtype`.

    `skip_modules_pattern`: regular expressions, searched in the dotted name of each module; one
    that is found skips the module and all below it. "auto" stands for
    DEFAULT_SKIP_MODULES_PATTERN, any other string is one pattern. `skip_modules_classes`: types,
    or parts of class names without regard to case. None for both casts every parameter that can
    rest, as `apply_layerwise_casting_hook` does. `non_blocking` has no meaning here. `exact` is
    that of `stowage.stow`.

    Raises InvalidArgument, with nothing changed, for a dtype that cannot be a storage, a pattern
    that is no regular expression, weights that rest as something else already, and a module
    whose weights group offloading has taken away.
    """
    if isinstance(skip_modules_pattern, str) and skip_modules_pattern == "auto":
        skip_modules_pattern = DEFAULT_SKIP_MODULES_PATTERN
    if skip_modules_pattern is None and skip_modules_classes is None:
        _cast_whole(module, _storage(storage_dtype), compute_dtype, exact)
        return
    storage = _storage(storage_dtype)
    selection = _Selection(_Skip.parse(skip_modules_pattern, skip_modules_classes))
    selection.walk(module, "")
    if not selection.layers:
        return
    _check_ready(module, selection.layers.values(), storage)
    rules: Rules = {_inside(selection.layers.values()): storage}
    stow(module, rules=rules, skip=selection.skips(), allow_unmatched=True, exact=exact)
    for layer in selection.layers.values():
        layer.to(compute_dtype)


def apply_layerwise_casting_hook(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    non_blocking: bool = False,
) -> None:
    """Lets every parameter of `module` that can (two or more dimensions) rest as `storage_dtype`;
    all others, and the buffers, get `compute_dtype`. `non_blocking` has no meaning here. Raises as
    `apply_layerwise_casting` does."""
    _cast_whole(module, _storage(storage_dtype), compute_dtype, False)


def _cast_whole(module: nn.Module, storage: str, compute: torch.dtype, exact: bool) -> None:
    _check_ready(module, [module], storage)
    if any(not (is_narrow(held) or cannot_rest(held)) for held in Inventory(module).parameters):
        stow(module, rules={"*": storage}, compute_dtype=compute, exact=exact)
    else:
        module.to(compute)


def _storage(dtype: torch.dtype) -> str:
    if dtype not in STORAGES:
        raise InvalidArgument(
            f"stowage: storage_dtype must be one of {', '.join(map(str, STORAGES))}, got {dtype}"
        )
    return STORAGES[dtype]


def _check_ready(module: nn.Module, layers: Iterable[nn.Module], storage: str) -> None:
    """Refuses weights that are not there, and those that would be rounded a second time."""
    for part in module.modules():
        mark = mark_of(part, "group_offloading")
        if mark is not None and not isinstance(mark, Mark):  # ours leaves the weights in place
            raise InvalidArgument(
                "stowage: layerwise casting must come before group offloading, got a module that "
                "is offloaded already: its parameters do not hold its weights"
            )
    held = {id(p): p for layer in layers for p in layer.parameters()}
    for weight in held.values():
        if not isinstance(weight, StowedTensor) or is_plain(weight):
            continue
        if weight.resting != storage:
            raise InvalidArgument(
                f"stowage: weights must be plain or rest as {storage}, got some that rest as "
                f"{weight.resting}; stowage.unstow(module) first, or stowage.stow(restow=True)"
            )


@dataclass(frozen=True)
class _Skip:
    """Which modules stay out, with everything below them."""

    patterns: tuple[re.Pattern[str], ...]
    classes: tuple[type[nn.Module], ...]
    words: tuple[str, ...]

    @classmethod
    def parse(cls, patterns: Patterns | None, classes: Classes | None) -> _Skip:
        given = (classes,) if isinstance(classes, str | type) else tuple(classes or ())
        for entry in given:
            if not isinstance(entry, str | type):
                raise InvalidArgument(
                    f"stowage: skip_modules_classes must hold types or class names, got {entry!r}"
                )
        return cls(
            tuple(_compiled(pattern) for pattern in listed(patterns)),
            tuple(entry for entry in given if isinstance(entry, type)),
            tuple(entry.lower() for entry in given if isinstance(entry, str)),
        )

    def reason(self, path: str, module: nn.Module) -> str:
        """What keeps the module out; "" if nothing does."""
        for pattern in self.patterns:
            if pattern.search(path):
                return f"pattern {pattern.pattern!r}"
        for kind in type(module).__mro__:
            name = kind.__name__.lower()
            if kind in self.classes or (
                kind is not nn.Module and any(word in name for word in self.words)
            ):
                return f"class {kind.__name__}"
        return ""


def listed(patterns: Patterns | None) -> tuple[str, ...]:
    """A string is one pattern, not its letters."""
    return (patterns,) if isinstance(patterns, str) else tuple(patterns or ())


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise InvalidArgument(
            f"stowage: skip_modules_pattern must hold regular expressions, got {pattern!r}: {error}"
        ) from None


@dataclass
class _Selection:
    """The layers to cast by their dotted names, and the paths that are skipped by what skips
    them."""

    skip: _Skip
    layers: dict[str, nn.Module] = field(default_factory=dict)
    skipped: dict[str, set[str]] = field(default_factory=dict)

    def walk(self, module: nn.Module, path: str) -> None:
        reason = self.skip.reason(path, module)
        if reason:
            self.skipped.setdefault(reason, set()).add(path)
        elif isinstance(module, LAYERS):
            self.layers[path] = module
        else:
            for name, child in module._modules.items():  # one that has two names under each
                if child is not None:
                    self.walk(child, f"{path}.{name}" if path else name)

    def skips(self) -> list[Predicate]:
        return [_below(paths, reason) for reason, paths in self.skipped.items()]


def _inside(layers: Iterable[nn.Module]) -> Predicate:
    """Whether a parameter belongs to one of the layers, or to a part of one."""
    parts = {id(part) for layer in layers for part in layer.modules()}

    def layerwise_casting(name: str, module: nn.Module) -> bool:
        return id(module) in parts

    return layerwise_casting


def _below(paths: set[str], reason: str) -> Predicate:
    """Whether a parameter is below one of the paths; the report calls it by the reason."""

    def below(name: str, module: nn.Module) -> bool:
        return any(around in paths for around in names_around(name))

    below.__name__ = reason
    return below

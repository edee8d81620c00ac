# SPDX-License-Identifier: Apache-2.0
"""How the weights of a model work, as `stow` and `load` are asked: how much of them is widened at
once, and whose inputs are cast, by hooks, to the compute dtype of a stowed weight, and outputs back
where that is asked. docs/working.md states the modes and their peak of memory."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stowage._model.patterns import ByPattern, Pattern, check, label, matches_module, near_misses
from stowage._model.weights import Choice, Held, Inventory
from stowage._ops import _torch
from stowage._ops._torch import tree_leaves, tree_map_only
from stowage._ops.errors import InvalidArgument
from stowage._tensor.products import blocks as _blocks
from stowage._tensor.stowed import StowedTensor
from stowage._tensor.views import PACKED

Blocks = Pattern | Sequence[Pattern] | None
InputCast = str | ByPattern[str] | None
MODES = ("tile", "layer", "block")
INPUT_CASTS = ("never", "compute", "restore")
_HOOK = "stowage.input_cast"  # as in _tensor/products/blocks.py
_compiling = torch.compiler.is_compiling


@dataclass(frozen=True)
class Granularity:
    """The arguments, parsed. None: what the model has so far stays."""

    working: str | None
    blocks: tuple[Pattern, ...]
    input_casts: tuple[tuple[Pattern, str], ...] | None
    exact: bool

    @classmethod
    def parse(
        cls, working: str | None, blocks: Blocks, input_cast: InputCast, exact: bool
    ) -> Granularity:
        """Raises InvalidArgument for a mode that does not exist or does not go with the others."""
        if working not in (None, *MODES):
            _refuse(f"working must be one of {', '.join(MODES)}, got {working!r}")
        if exact and working == "tile":
            _refuse(
                "exact=True needs working='layer' or 'block', got working='tile': a weight that is "
                "widened in tiles has sums in another order than the dense product"
            )
        given = _patterns(blocks)
        if (working == "block") != bool(given):
            got = f"working={working!r} and blocks={blocks!r}"
            _refuse(f"blocks must be given for working='block', and only then, got {got}")
        casts = _casts(input_cast)
        return cls(working, given, casts, exact or working in ("layer", "block"))

    def problems(self, inventory: Inventory, resting: Iterable[nn.Module]) -> list[str]:
        """A sentence for each pattern that matches nothing. `resting` are the modules that will
        hold a resting weight."""
        found, holders = [], {id(module) for module in resting}
        for pattern in self.blocks:
            if not _matching(pattern, inventory):
                none = _none(pattern, inventory)
                found.append(f"blocks {label(pattern)}: must match a module, {none}")
        for pattern, _ in self.input_casts or ():
            hit = _matching(pattern, inventory)
            if not any(id(module) in holders for module in hit):
                got = "matches only others" if hit else _none(pattern, inventory)
                found.append(
                    f"input_cast {label(pattern)}: must match a module that holds a resting "
                    f"weight, {got}"
                )
        return found

    def apply(self, inventory: Inventory) -> None:
        """Hooks for what is asked, in place of those of an earlier call."""
        for module in inventory.modules.values():
            if self.working is not None:
                _blocks.unmark(module)
            if self.input_casts is not None:
                cast_inputs(module, "never")
        for pattern in self.blocks:
            for module in _outermost(pattern, inventory):
                _blocks.mark(module)
        for path, module in inventory.modules.items():
            for pattern, how in self.input_casts or ():
                if _holds(module) and matches_module(pattern, path, module):
                    cast_inputs(module, how)
                    break


def holders(choices: Iterable[Choice]) -> Iterator[nn.Module]:
    """The modules that hold a resting weight once the choices are carried out."""
    for choice in choices:
        if choice.storage is not None or isinstance(choice.held.tensor, StowedTensor):
            yield from (site.module for site in choice.held.sites)


def forget(model: nn.Module) -> None:
    """Removes every hook of blocks and input casts."""
    for module in model.modules():
        _blocks.unmark(module)
        cast_inputs(module, "never")


def _matching(pattern: Pattern, inventory: Inventory) -> list[nn.Module]:
    return [m for path, m in inventory.modules.items() if matches_module(pattern, path, m)]


def _none(pattern: Pattern, inventory: Inventory) -> str:
    return f"matches none{near_misses(pattern, inventory.modules)}"


def _patterns(blocks: Blocks) -> tuple[Pattern, ...]:
    if blocks is None:
        return ()
    listed: tuple[Pattern, ...]
    if isinstance(blocks, Sequence) and not isinstance(blocks, str):
        listed = tuple(blocks)
    else:
        listed = (blocks,)
    for pattern in listed:
        check(pattern, "blocks", root=True)
    return listed


def _casts(input_cast: InputCast) -> tuple[tuple[Pattern, str], ...] | None:
    if input_cast is None:
        return None
    rules = dict(input_cast) if isinstance(input_cast, Mapping) else {"*": input_cast}
    for pattern, how in rules.items():
        check(pattern, "a key of input_cast", root=True)
        if how not in INPUT_CASTS:
            allowed = ", ".join(INPUT_CASTS)
            _refuse(
                f"input_cast must be {allowed}, or a mapping of patterns to one of these, got "
                f"{pattern!r}: {how!r}"
            )
    if rules == {"*": "never"}:
        return ()
    return tuple(rules.items())


def _outermost(pattern: Pattern, inventory: Inventory) -> Iterator[nn.Module]:
    """`*` crosses dots, so that "layers.*" matches what is below the layers too."""
    above: tuple[str, ...] = ()
    for path, module in inventory.modules.items():
        if not path.startswith(above) and matches_module(pattern, path, module):
            above += (f"{path}." if path else "",)
            yield module


def _holds(module: nn.Module) -> bool:
    return any(isinstance(p, StowedTensor) for p in _torch.parameters(module).values())


def _refuse(text: str) -> None:
    raise InvalidArgument(f"stowage: {text}")


# --- how one weight works, for the report ---------------------------------------------------------

_ROWS = (nn.Embedding, nn.EmbeddingBag)
_OF_MATRICES = (nn.Linear, nn.RNN, nn.GRU, nn.LSTM, nn.RNNCellBase)  # f64: stock products
_IN_TILES = (*_OF_MATRICES, nn.Bilinear, _torch.ConvNd, *_ROWS)


def block_paths(inventory: Inventory) -> list[str]:
    """The paths of the blocks of a model, as prefixes of names."""
    blocks = (path for path, module in inventory.modules.items() if _blocks.is_block(module))
    return [f"{path}." if path else "" for path in blocks]


def mode_of(held: Held, blocks: list[str]) -> str:
    """rows of a table, else tile, layer or block; `tile, else whole` where the module's own code
    decides, since only products go by tiles; whole where torch has one op for all products."""
    if not isinstance(held.tensor, StowedTensor):
        return ""
    if all(isinstance(site.module, _ROWS) for site in held.sites):
        return "rows"
    if held.tensor._exact:
        under = any(name.startswith(path) for name in held.names for path in blocks)
        return "block" if under else "layer"
    modules, dtype = [site.module for site in held.sites], held.tensor.dtype
    if dtype is torch.float64 and any(isinstance(module, _OF_MATRICES) for module in modules):
        return "whole"
    if any(isinstance(module, nn.LSTM) and not module.proj_size for module in modules):
        # oneDNN, or the library of a device, takes all steps at once; bf16 on some CPUs.
        taken = held.tensor.is_cpu and dtype is torch.float32
        return "whole" if taken and torch.backends.mkldnn.enabled else "tile, else whole"
    return "tile" if all(isinstance(m, _IN_TILES) for m in modules) else "tile, else whole"


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


_to_compute.__module__ = "stowage._model.input_cast"  # pickles name it


def _note_and_cast(module: nn.Module, args: Any, kwargs: Any) -> Any:
    floats = (t.dtype for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor))
    given = next((dtype for dtype in floats if dtype.is_floating_point), None)
    _running().append(_Given(id(module), given))
    return _to_compute(module, args, kwargs)


_note_and_cast.__module__ = "stowage._model.input_cast"  # pickles name it


def _restore(module: nn.Module, args: Any, result: Any) -> Any:
    running, given = _running(), None
    # What a KeyboardInterrupt left lies above; torch calls no hook after one.
    while running and given is None:
        last = running.pop()
        given = last if last.module == id(module) else None
    if given is None or given.dtype is None or result is None:
        return None
    return _cast(result, given.dtype)


_restore.__module__ = "stowage._model.input_cast"  # pickles name it


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

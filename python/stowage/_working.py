# SPDX-License-Identifier: Apache-2.0
"""What an operator that writes gets in place of stowed tensors: views of dequantized copies.

There is one copy for each weight, of the rows that its arguments show, so that arguments which
share memory go on doing so, and a row of a large weight costs little. What a write names of a copy,
whether or not it changes it, is told by views and indices, never by comparing values.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stowage._ops import library
from stowage._ops._torch import tree_leaves, tree_map_only
from stowage.tensor import VALUE_DTYPES, StowedTensor
from stowage.views import PACKED, Chain, Packed, Step, replay, source

aten = torch.ops.aten


class Copy(NamedTuple):
    """Rows [first, first + len(new)) of a weight: for the operator to write, and as they were."""

    weight: StowedTensor
    first: int
    new: Tensor
    old: Tensor


def identity(weight: StowedTensor) -> int:
    """Aliases (`w`, `w.data`) have the same codes object."""
    return id(weight._parts()[0])


class Working:
    """The copies of one run of an operator."""

    def __init__(self, written: list[Packed], arguments: Any) -> None:
        self.copies: dict[int, Copy] = {}
        self.exact: dict[int, tuple[StowedTensor, Tensor]] = {}  # of weights being initialised
        self._stood_in: list[tuple[Tensor, Packed, torch.Size]] = []
        self._whole: set[int] = set()  # copies that are written everywhere
        self._marks: dict[int, Tensor] = {}  # of the others: not zero where they are written
        weights = {identity(w): w for w in (source(t)[0] for t in written)}
        shown = [source(t) for t in tree_leaves(arguments) if isinstance(t, PACKED)]
        for key, weight in weights.items():
            if weight._origin is not None:
                exact = weight._origin.opened(weight)
                if exact is not None:  # written itself, and the resting form is made from it
                    self.exact[key] = (weight, exact)
                    self.copies[key] = Copy(weight, 0, exact, exact)
                    continue
            spans = [_rows(chain, weight) for w, chain in shown if identity(w) == key]
            first, last = min(s[0] for s in spans), max(s[1] for s in spans)
            values = _dequantized(weight, first, last)
            self.copies[key] = Copy(weight, first, values, values.clone())

    def stand_in(self, t: Packed) -> Tensor:
        """What the operator gets for a stowed argument."""
        weight, chain = source(t)
        copy = self.copies.get(identity(weight))
        if copy is None:
            return t.dequantize()
        view = replay(_within(chain, copy), copy.new)
        self._stood_in.append((view, t, view.shape))
        return view

    def name(self, t: Packed, dye: Callable[[Tensor], object] | None) -> None:
        """Notes what the operator writes of what `t` shows: all of it, or where `dye` puts values
        that are not zero in a tensor of zeros."""
        weight, chain = source(t)
        key = identity(weight)
        copy = self.copies[key]
        if key in self.exact or key in self._whole or weight.is_meta:
            return
        chain = _within(chain, copy)
        if dye is None and _is_all(replay(chain, copy.new), copy.new):
            self._whole.add(key)
            return
        mark = self._marks.setdefault(key, torch.zeros_like(copy.new))
        seen = replay(chain, mark)
        if dye is None:
            seen.fill_(math.nan if seen.is_floating_point() else -1)
        else:
            dye(seen)

    def named(self, key: int) -> Tensor | None:
        """Which elements of a copy are written; None for all."""
        if key in self._whole or key not in self._marks:
            return None
        named = self._marks[key] != 0
        return None if bool(named.all()) else named

    def used(self) -> set[int]:
        """The weights that arguments have stood in for so far."""
        return {identity(source(t)[0]) for _, t, _ in self._stood_in}

    def resized(self) -> bool:
        return any(view.shape != shape for view, _, shape in self._stood_in)

    def given_back(self, result: Any) -> Any:
        """The operator's result with the stowed arguments in place of what stood in for them."""
        stood_in = {id(view): t for view, t, _ in self._stood_in}
        return tree_map_only(Tensor, lambda t: stood_in.get(id(t), t), result)


def _rows(chain: Chain, weight: StowedTensor) -> tuple[int, int]:
    """The rows of a weight that a view shows."""
    rows = weight.shape[0] if weight.dim() else 1
    if chain and not chain[0].kwargs and chain[0].args[:1] == (0,):
        if chain[0].op is aten.select.int:
            index = chain[0].args[1] % rows
            return index, index + 1
        if chain[0].op is aten.slice.Tensor:
            first, last, _ = slice(*chain[0].args[1:3]).indices(rows)
            return first, max(first, last)
    return 0, rows


def _is_all(view: Tensor, copy: Tensor) -> bool:
    same = (view.dtype, view.shape, view.stride()) == (copy.dtype, copy.shape, copy.stride())
    return same and view.storage_offset() == copy.storage_offset()


def _within(chain: Chain, copy: Copy) -> Chain:
    """The same view, of a copy that may hold some rows only."""
    if not copy.weight.dim() or copy.new.shape[0] == copy.weight.shape[0]:
        return chain
    return _moved(chain, copy.weight, copy.first)


def _moved(chain: Chain, weight: StowedTensor, by: int) -> Chain:
    """The same view, from rows that begin at `by`."""
    first, last = _rows(chain, weight)
    head = chain[0]
    if head.op is aten.select.int:
        return (Step(head.op, (0, first - by)), *chain[1:])
    return (Step(head.op, (0, first - by, last - by, *head.args[3:])), *chain[1:])


def _dequantized(weight: StowedTensor, first: int, last: int) -> Tensor:
    if weight._dt not in VALUE_DTYPES or not weight.dim() or last - first == weight.shape[0]:
        return weight.dequantize()[first:last] if weight.dim() else weight.dequantize()
    codes, *scales = weight._parts()
    ids = torch.arange(first, last, device=codes.device)
    return library.embedding(ids, codes, scales, weight._storage.key, weight.shape, weight._dt)

# SPDX-License-Identifier: Apache-2.0
"""Writes to stowed weights: carried out by requantizing what changed, or refused; never lost.

One mechanism for every operator that writes, driven by its schema: the weights that it writes are
dequantized, it runs on views of those copies, and the rows that changed are quantized again
(requantize.py). There is one copy for each weight, of the rows that the arguments show, so that
arguments which share memory go on doing so, and a row of a large weight costs little. What a write
names of a copy, whether or not it changes it, is told by views and indices, never by values.
"""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from stowage._ops import _torch, library
from stowage._ops._torch import tree_leaves, tree_map_only
from stowage._ops.errors import InvalidArgument, Unsupported, translated
from stowage._tensor import requantize, tables
from stowage._tensor.stowed import VALUE_DTYPES, StowedTensor, initialising, wrap
from stowage._tensor.views import PACKED, Chain, Packed, Step, StowedView, replay, source

aten = torch.ops.aten

# They write running statistics, and their schemas do not say so.
_UNMARKED = {
    "aten::batch_norm",
    "aten::native_batch_norm",
    "aten::_native_batch_norm_legit",
    "aten::cudnn_batch_norm",
    "aten::miopen_batch_norm",
    "aten::batch_norm_update_stats",
}
_STATISTICS = ("running_mean", "running_var")  # arguments of those
# What adds to the values that are there, so that rounding can swallow a small step.
_ACCUMULATES = re.compile(
    r"aten::_?(foreach_|fused_)?"
    r"(add|sub|mul|div|lerp|addc|adam|sgd|adagrad|addmm|addmv|addbmm|addr|baddbmm|true_divide|"
    r"subtract|multiply|divide|index_add|scatter_add|scatter_reduce|index_reduce|pow|cumsum|"
    r"nextafter)"
)


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
        if key in self.exact or weight.is_meta:
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
    return (view.dtype, view.shape, view.stride()) == (copy.dtype, copy.shape, copy.stride())


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


def writes(called: Any) -> bool:
    """Whether an operator changes any of its arguments."""
    return _torch.schema(called).is_mutable or _torch.schema(called).name in _UNMARKED


def _accumulates(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if _ACCUMULATES.match(_torch.schema(called).name) or "reduce" in _torch.overload_name(called):
        return True
    for i, argument in enumerate(_torch.schema(called).arguments):
        if argument.name == "accumulate":  # of index_put_ and put_
            return bool(kwargs.get("accumulate", args[i] if i < len(args) else False))
    return False


_ADDRESSES = {"index", "indices", "mask"}  # arguments that name the elements to write
_BY_VALUE = {"aten::embedding_renorm_"}  # writes those rows that it finds too long


def _addressed(called: Any) -> bool:
    """Whether an operator writes some elements only of what it is given to write."""
    name, arguments = _torch.schema(called).name, _torch.schema(called).arguments
    if not name.startswith("aten::") or not name.endswith("_"):
        return False
    return name == "aten::fill_diagonal_" or any(a.name in _ADDRESSES for a in arguments)


def _name(work: Working, called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tells `work` which elements the operator writes. A row that keeps its value is written all
    the same: a scale that only written rows share is computed anew."""
    addressed = _addressed(called)
    for t in _written(called, args, kwargs):
        work.name(t, (lambda zeros: _dye(called, zeros, args, kwargs)) if addressed else None)


def _dye(called: Any, zeros: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Runs the operator on zeros with a value that no reduction swallows in place of every value:
    it is found wherever the operator writes, changed or not."""
    dye = math.nan if zeros.is_floating_point() else -1

    def dyed(argument: Any, given: Any) -> Any:
        if str(argument.type) == "number":
            return dye
        if not isinstance(given, Tensor) or argument.name in _ADDRESSES:
            return given
        return torch.full(given.shape, dye, dtype=zeros.dtype, device=zeros.device)

    known = _torch.schema(called).arguments
    rest = [dyed(a, given) for a, given in zip(known[1:], args[1:], strict=False)]
    called(zeros, *rest, **{a.name: dyed(a, kwargs[a.name]) for a in known if a.name in kwargs})


def _refuse(called: Any, why: str) -> NoReturn:
    raise Unsupported(f"stowage: {called} would {why}; dequantize the weight or unstow the model")


def _written(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Packed]:
    """The stowed tensors among the arguments that the schema marks as written."""
    schema = _torch.schema(called)
    marked: list[Any] = []
    unmarked = _STATISTICS if schema.name in _UNMARKED else ()
    for i, argument in enumerate(schema.arguments):
        is_write = argument.alias_info is not None and argument.alias_info.is_write
        if is_write or argument.name in unmarked:
            value = kwargs.get(argument.name, args[i] if i < len(args) else None)
            marked += value if isinstance(value, (list, tuple)) else [value]
    return [t for t in marked if isinstance(t, PACKED)]


def _current(t: Packed) -> StowedTensor:
    """The weight that a write to `t` changes."""
    weight, _ = source(t)
    seen = t._weight if isinstance(t, StowedView) else t
    if seen is not weight:
        mine, there = seen._parts()[0], weight._parts()[0]
        if mine.untyped_storage().data_ptr() != there.untyped_storage().data_ptr():
            raise Unsupported(
                f"stowage: {t!r} is a stale view: the codes of its weight have moved since it was "
                "taken; take it again"
            )
    return weight


def write(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operator that writes. Raises Unsupported or InvalidArgument, with nothing changed."""
    written = _written(called, args, kwargs)
    name = _torch.schema(called).name
    if any(type(source(t)[0]._parts()[0]) is not Tensor for t in written):
        _refuse(called, "write to a stowed weight inside a compiled graph, where nothing checks it")
    if written and torch.Tag.inplace_view in called.tags:
        _refuse(called, "change the shape of a stowed weight")
    if written and name in _UNMARKED:
        _refuse(called, "keep running statistics in a stowed weight")
    for t in written:
        _check_kept(t)
    accumulates = _accumulates(called, args, kwargs)
    if accumulates and any(_trained(t) for t in written):
        _refuse(
            called,
            "train a stowed weight in place, where rounding swallows most steps: keep it frozen "
            "(requires_grad=False), train an adapter or a plain copy",
        )
    work = Working([_current(t) for t in written], (args, kwargs))
    given = tree_map_only(PACKED, work.stand_in, args)
    read = work.used()  # without what is only written, as `out`
    named = tree_map_only(PACKED, work.stand_in, kwargs)
    result = called(*given, **named)
    if work.resized():
        _refuse(called, "resize a stowed weight (wrong shape of `out`)")
    if name not in _BY_VALUE:
        _name(work, called, args, kwargs)
    changes = []
    for key, copy in work.copies.items():
        if key not in work.exact:
            named = copy.new != copy.old if name in _BY_VALUE else work.named(key)
            changes.append(requantize.plan(*copy, named, accumulates and key in read))
    changes += [requantize.afresh(weight, exact) for weight, exact in work.exact.values()]
    for change in changes:
        change.commit()
    for weight, exact in work.exact.values():
        weight._origin.initialised(exact)
    return work.given_back(result)


def _trained(t: Packed) -> bool:
    """Whether a step would be lost in rounding: not while the exact value is there to take it."""
    held = _held(t)
    return (held.requires_grad or t.requires_grad) and not initialising(source(t)[0])


def _held(t: Packed) -> StowedTensor:
    """The weight that others hold, of which `t` shows something, or that it is an alias of."""
    weight = source(t)[0]
    return weight if weight._of is None else weight._of


# --- whole weights --------------------------------------------------------------------------------


def same_form(into: Any, values: Any) -> bool:
    """Whether codes and scales can be copied as they are."""
    if type(into) is not StowedTensor or type(values) is not StowedTensor:
        return False
    return into._storage is values._storage and into.shape == values.shape and into._root is None


def _check_kept(t: Packed) -> None:
    """Raises Unsupported where what is written to `t` would be lost."""
    if _held(t)._given:
        raise Unsupported(
            "stowage: a DTensor gives rows of a resting weight as a copy, to which writes are "
            "lost; write to the DTensor, clone() what it gave, or load a checkpoint with "
            "stowage.sharding.load"
        )


def copy_parts(into: StowedTensor, values: StowedTensor) -> StowedTensor:
    _check_kept(into)
    requantize.Change(into, values._parts()).commit()
    return into


def set_data(into: Tensor, values: Tensor) -> Any:
    """`into.data = values`: the values go into the weight, whose compute dtype follows them."""
    if type(into) is not StowedTensor:
        raise Unsupported("stowage: a view's .data cannot be replaced; copy_ into the view")
    if into._root is not None:
        raise Unsupported("stowage: a slice's .data cannot be replaced; copy_ into the slice")
    if type(values) is StowedTensor:
        return _adopt(into, values)
    if not values.is_floating_point():
        raise InvalidArgument(f"stowage: .data must be floating, got {values.dtype}")
    if into.shape != values.shape:
        return _adopt(into, _reshaped(into, values))
    if values.dtype is not into._dt:
        _adopt(into, into._like(dtype=values.dtype))
    with torch.no_grad():
        tables.dispatch(aten.copy_.default, (into, values), {})
    return None


def _reshaped(into: StowedTensor, values: Tensor) -> StowedTensor:
    """What takes the place of a weight whose `.data` gets another shape: a table that grows."""
    if rule := into._storage.misfit(values.shape):
        raise InvalidArgument(f"stowage: .data: {rule}, got {list(values.shape)}")
    wide = values if values.dtype in VALUE_DTYPES else values.float()
    try:
        parts = library.quantize(wide.detach().contiguous(), into._storage.key)
    except RuntimeError as error:
        raise translated(error) from None
    return wrap(parts, into._storage, tuple(values.shape), values.dtype, into._exact)


def _adopt(into: StowedTensor, values: StowedTensor) -> None:
    """Makes `into` an alias of `values`, as the setter of plain tensors does."""
    with _torch.DisableTorchFunctionSubclass():
        Tensor.data.__set__(into, values)  # type: ignore[attr-defined]
    into._storage, into._dt, into._exact = values._storage, values._dt, values._exact
    into._root, into._trail = values._root, values._trail
    into._of = values if values._of is None else values._of
    into._set_parts(values._parts(), values.shape)
    if into._origin is not None and into._origin is not values._origin:
        into._origin.written()

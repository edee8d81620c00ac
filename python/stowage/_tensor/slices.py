# SPDX-License-Identifier: Apache-2.0
"""Slices of rows that stay stowed, on slices of the parts, where blocks and scales allow."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from stowage._ops import _torch
from stowage._ops.storage import Storage
from stowage._tensor.stowed import StowedTensor, initialising, lying, rows_and_columns, wrap
from stowage._tensor.views import (
    TRANSPOSE,
    Packed,
    Step,
    StowedView,
    matrix_of,
    outside_inference,
    share,
    view_of,
)

aten = torch.ops.aten
Around = Callable[[Tensor], AbstractContextManager[object]]
_OF_ONE = {"row2": "row", "row": "tensor"}  # the scaling of one index of dim 0


def row_slice(t: StowedTensor, first: int, last: int) -> StowedTensor | None:
    """Rows [first, last) as a stowed tensor on slices of the parts; None where blocks forbid it."""
    own = t._parts()
    with _as_views(own[0]):
        parts = _row_parts(t, own, first, last)
    if parts is None:
        return None
    step = Step(aten.slice.Tensor, (0, first, last))
    return _slice_of(t, own, step, parts, t._storage, (last - first, *t.shape[1:]), first)


def row(t: StowedTensor, index: int) -> Packed | None:
    """One index of dim 0 of a weight of three or more dimensions, such as an expert, still stowed.

    Its scales are those of a weight with a dimension less: row for row2, tensor for row. Of a stack
    that lies transposed, the transposed view of a matrix that is stowed.
    """
    if t.dim() < 3 or not 0 <= index < t.shape[0] or not _may_be_written(t._parts()[0]):
        return None
    return _row(t, index, _as_views)


def matrix(t: Any) -> tuple[StowedTensor, bool] | None:
    """The stowed matrix that `t` is, or whose transpose it is, and which of the two; else None. Of
    a stack whose memory may be read-only, one that lies there, to be read at once."""
    if type(t) is not StowedView or t._weight.dim() != 3:
        return matrix_of(t)
    (step, *rest), weight = t._chain, t._weight
    if step.op is not aten.select.int or initialising(weight):
        return None
    if any(turn != TRANSPOSE for turn in rest):  # autograd turns what it has turned
        return None
    dim, index = step.args
    if dim % 3 or type(index) is not int:
        return None
    one = outside_inference(lambda: _row(weight, index % weight.shape[0], nullcontext))
    if one is None or (found := matrix_of(one)) is None:
        return None
    return found[0], found[1] != bool(len(rest) % 2)


def lying_matrix(stack: StowedTensor, index: int) -> StowedTensor | None:
    """One matrix of [E, O, K] as it lies, as products with it take it, to be read at once; None
    where blocks forbid it."""
    if stack._storage.transposed:
        stack = lying(stack)
    one = outside_inference(lambda: _row(stack, index, lambda _: nullcontext()))
    return one if isinstance(one, StowedTensor) else None


def matrix_parts(stack: StowedTensor, index: int) -> list[Tensor] | None:
    """Its parts."""
    one = lying_matrix(stack, index)
    return None if one is None else one._parts()


def _row(t: StowedTensor, index: int, around: Around) -> Packed | None:
    own, storage = t._parts(), t._storage
    if storage.transposed:
        one = _row(lying(t), index, around)
        seen: Packed | None = None if one is None else view_of(aten.t.default, one, (), {})
        return seen
    with around(own[0]):
        if storage.flat:
            each = math.prod(t.shape[1:])
            ends = (index * each, (index + 1) * each)
            parts = _flat_slices(storage, own, *ends, index + 1 == t.shape[0])
            if parts is None:
                return None
        elif storage.kind == "block":
            if math.prod(t.shape[2:]) % storage.block:
                return None
            behind = 1 + storage.of_groups
            groups = [part[index].view(t.shape[1], -1, *part.shape[2:]) for part in own[1:behind]]
            parts = [own[0][index], *groups, *own[behind:]]
            if storage.under_rows:
                storage = storage.under(_OF_ONE[storage.outer_kind])
                parts[-1] = parts[-1][index].view(() if storage.under_one_of_all else (-1, 1))
        elif storage.kind in ("none", "tensor"):
            parts = [own[0][index], *own[1:]]
        else:
            scales = [part[index] for part in own[1:]]
            if storage.kind == "row":
                scales = [scale.view(()) for scale in scales]
            parts = [own[0][index], *scales]
        if storage.kind in _OF_ONE:
            storage = storage.of_kind(_OF_ONE[storage.kind])
        if storage.misfit(t.shape[1:]):
            return None
        parts[0] = parts[0].view(storage.layout(t.shape[1:])[0][2])
    return _slice_of(t, own, Step(aten.select.int, (0, index)), parts, storage, t.shape[1:], index)


def _as_views(codes: Tensor) -> AbstractContextManager[object]:
    """Where slices of parts are views to autograd, which have the version of what they are a part
    of: a graph that keeps one sees writes to the weight."""
    if type(codes) is not Tensor or codes.is_inference() or _torch.len_torch_dispatch_stack():
        return nullcontext()
    # What torch.overrides.enable_reentrant_dispatch() is, without its generator of 1.3 us.
    restored: AbstractContextManager[object] = _torch.RestorePythonTLSSnapshot()
    return restored


def _may_be_written(codes: Tensor) -> bool:
    """Memory that may be read-only has no slices, since a write moves it (writes.py): such as torch
    did not allocate, but for what torch.load reads."""
    return codes.untyped_storage().resizable() or hasattr(codes, "_stowage_writable")


def _slice_of(
    t: StowedTensor,
    own: list[Tensor],
    step: Step,
    parts: list[Tensor],
    storage: Storage,
    shape: Sequence[int],
    first: int,
) -> StowedTensor:
    offset = t.storage_offset() + first * rows_and_columns(t.shape)[1]
    result = wrap(parts, storage, shape, t._dt, t._exact, offset=offset)
    result._root = t if t._root is None else t._root
    result._trail = (*t._trail, step)
    if hasattr(own[0], "_stowage_writable"):
        parts[0]._stowage_writable = True  # type: ignore[attr-defined]
    share(result, t)
    return result


def _row_parts(t: StowedTensor, own: list[Tensor], first: int, last: int) -> list[Tensor] | None:
    if not (t.dim() and _may_be_written(own[0])):
        return None
    return rows_of_parts(own, t._storage, t.shape, first, last)


def rows_of_parts(
    own: Sequence[Tensor], storage: Storage, shape: Sequence[int], first: int, last: int
) -> list[Tensor] | None:
    """Slices of the parts that hold rows [first, last), if there are such.

    4-bit blocks are flat: both ends must fall on a block's edge (nested: on one of 256 blocks).
    """
    rows, columns = rows_and_columns(shape)
    if not 0 <= first <= last <= rows:
        return None
    if storage.flat:
        return _flat_slices(storage, own, first * columns, last * columns, last == rows)
    if storage.by_columns:
        return list(own) if (first, last) == (0, rows) else None
    each, in_rows = storage.rows_together(shape), storage.in_rows
    if first % each or (last % each and last != rows):
        return None
    scales = [part[first // each : -(-last // each)] for part in own[1:in_rows]]
    return [own[0][first:last], *scales, *own[in_rows:]]


def _flat_slices(
    storage: Storage, own: Sequence[Tensor], start: int, stop: int, to_end: bool
) -> list[Tensor] | None:
    block, nested = storage.block, storage.nested
    edge = block * (storage.outer or 1)
    if start % edge or start % 2 or (not to_end and (stop % edge or stop % 2)):
        return None
    codes, absmax, *rest = own
    parts = [codes[start // 2 : (stop + 1) // 2], absmax[start // block : -(-stop // block)]]
    if nested:
        group, *shared = rest
        parts += [group[start // edge : -(-stop // edge)], *shared]
    return parts

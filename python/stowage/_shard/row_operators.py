# SPDX-License-Identifier: Apache-2.0
"""What operators do with rows of resting weights: moves, slices, copies and collectives of records.

An operator that the table lacks computes with the weight where all rows are together, and else
dequantizes the rows that are there and is counted: `stowage.fallbacks()`.
"""

from typing import Any

import torch
from torch import Tensor

from stowage._ops import _torch
from stowage._ops._torch import tree_map_only
from stowage._ops.errors import InvalidArgument, Unsupported
from stowage._shard.beginning import follow, initialise, initialising, takes_over
from stowage._shard.callers import (
    HALF_DONE,
    SHARDS_ONE,
    asked_by,
    check_reshard,
    name_of,
    sharder,
)
from stowage._shard.pieces import Whole, is_tagged, rows_misfit, untagged
from stowage._shard.rows import StowedRows, rows_that_fit
from stowage._tensor.operators import counted_fallbacks
from stowage._tensor.tables import row_op
from stowage._tensor.writes import writes

aten = torch.ops.aten


@row_op()
def _other(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if writes(called):
        if any(isinstance(t, StowedRows) and initialising(t) for t in args):
            return initialise(called, args, kwargs)
        raise Unsupported(
            f"stowage: {called} would write to rows of a resting weight that is spread over "
            "processes; write before it is sharded, or load a checkpoint"
        )
    if _torch.can_decompose(called)():
        result = called.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result

    def values(rows: StowedRows) -> Tensor:
        if (piece := rows.piece()) is not None:  # all rows, or some that blocks divide
            return piece
        counted_fallbacks[str(called)] += 1
        return rows.dequantize()

    return called(
        *tree_map_only(StowedRows, values, args), **tree_map_only(StowedRows, values, kwargs)
    )


# --- the same rows in another place ---------------------------------------------------------------


def view_of(rows: StowedRows, records: Tensor, skip: int = 0) -> StowedRows:
    """Some of `rows`, in the same memory and with the same knowledge of its place."""
    view = StowedRows(records, rows._shared(), rows._whole, rows._start, rows._skip + skip)
    view._kept = rows._kept
    return view


@row_op(aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def _alias(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return view_of(args[0], args[0]._records)


@row_op(aten.clone.default)
def _clone(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows = args[0]
    shared = [part.clone() for part in rows._shared()]
    return StowedRows(rows._records.clone(), shared, rows._whole, [rows.first])


@row_op(aten._to_copy.default, aten._pin_memory.default)
def _move(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Records and shared parts move; a floating dtype becomes the compute dtype."""
    rows, dtype = args[0], kwargs.get("dtype") or args[0].dtype
    if not dtype.is_floating_point:
        return NotImplemented
    where = {k: v for k, v in kwargs.items() if k in ("device", "pin_memory", "non_blocking")}
    records, *shared = (called(part, *args[1:], **where) for part in _inner(rows))
    moved = StowedRows(records, shared, rows._whole._replace(dtype=dtype), [rows.first])
    moved._kept = [rows._origin and rows._origin.at(moved.device)]
    return moved


@row_op(aten.is_pinned.default)
def _is_pinned(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return all(called(part, *args[1:], **kwargs) for part in _inner(args[0]))


@row_op(aten.equal.default)
def _equal(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Whether records and shared parts are the same bytes."""
    a, b = args
    if not isinstance(a, StowedRows) or not isinstance(b, StowedRows):
        return NotImplemented
    same = a._whole == b._whole and a.shape == b.shape
    return same and all(called(x, y) for x, y in zip(_inner(a), _inner(b), strict=True))


def _inner(rows: StowedRows) -> list[Tensor]:
    return [rows._records, *rows._shared()]


# --- rows of rows ---------------------------------------------------------------------------------


@row_op(aten.slice.Tensor)
def _slice(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = [*args[1:], *(0, None, None, 1)[len(args) - 1 :]]
    rows, (dim, first, last, step) = args[0], given
    if dim % rows.dim() or step != 1:
        return NotImplemented
    start, stop, _ = slice(first, last).indices(rows.shape[0])
    piece = view_of(rows, rows._records[start : max(start, stop)], start)
    padded = rows.shape[0] > rows._whole.shape[0]  # after a gather of unequal shares
    return piece.stowed() if padded and piece._is_all() else piece


@row_op(aten.split.Tensor, aten.split_with_sizes.default)
def _split(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows, sizes, dim = (*args, kwargs.get("dim", 0))[:3]
    if dim % rows.dim():
        if sharder() is None:
            return NotImplemented
        raise Unsupported(
            "stowage: rows of a resting weight must be sharded along dim 0, got "
            f"Shard({dim % rows.dim()}) for {rows!r}; use Shard(0)" + HALF_DONE
        )
    pieces, skip = [], 0
    for records in called(rows._records, sizes, 0):
        pieces.append(view_of(rows, records, skip))
        skip += records.shape[0]
    return pieces


@row_op(aten.view.default, aten._unsafe_view.default)
def _flat_view(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """FSDP2 keeps a view(-1) and only compares its memory; to it the rows may stay rows. DTensor
    gives its tensor away as a view of the same shape: a weight, where all rows are there."""
    rows, size = args
    if tuple(size) == tuple(rows.shape):
        return together(view_of(rows, rows._records))
    return (
        view_of(rows, rows._records) if tuple(size) in ((-1,), (rows.numel(),)) else NotImplemented
    )


@row_op(aten.as_strided.default)
def _as_strided(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows, size, stride, offset = (*args, kwargs.get("storage_offset"))[:4]
    count = rows_that_fit(size, rows.shape)
    if count is None or count > rows.shape[0] or offset or tuple(stride) != rows.stride():
        return NotImplemented
    return view_of(rows, rows._records[:count])


@row_op(aten.zeros_like.default)
def _zeros_like(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Plain, as of a whole weight: gradients and moments are made so."""
    dtype, device = (kwargs.get(name) or getattr(args[0], name) for name in ("dtype", "device"))
    return torch.zeros(args[0].shape, dtype=dtype, device=device)


@row_op(aten.new_empty.default, aten.new_zeros.default, aten.empty_like.default)
def _make(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Room for rows of the same weight, whose place is not known yet; else a plain tensor."""
    rows = args[0]
    like = called is aten.empty_like.default
    size = rows.shape if like else args[1]
    count = rows_that_fit(size, rows.shape)
    if count is None or kwargs.get("dtype") not in (None, rows.dtype):
        dtype, device = (kwargs.get(name) or getattr(rows, name) for name in ("dtype", "device"))
        plain = torch.zeros if called is aten.new_zeros.default else torch.empty
        return plain(size, dtype=dtype, device=device)
    device = {"device": kwargs["device"]} if kwargs.get("device") else {}
    made = empty_rows(rows, count, rows.first if like else None, **device)
    if called is aten.new_zeros.default:
        made._whole = _spread(rows)
    made._kept = [rows._origin and rows._origin.unset()]
    return made


def _spread(rows: StowedRows) -> Whole:
    """Rows that FSDP2 spreads, though DTensor has left others elsewhere: only these come back."""
    whole, frame = rows._whole, asked_by(sharder(), SHARDS_ONE)
    if frame is None:
        return whole
    parameter, given = frame.f_locals["self"], frame.f_locals["param"]
    check_reshard(parameter)
    first, last = rows.first or 0, (rows.first or 0) + rows.shape[0]
    if (first, last) == (0, whole.shape[0]):
        return whole
    total = whole.shape[0]
    each = max(1, -(-total // given.device_mesh.size()))
    for start in range(0, total, each):  # of all processes, so that all refuse alike
        stop = min(start + each, total)
        if why := rows_misfit(whole.storage, whole.shape, start, stop):
            raise Unsupported(
                f"stowage: {name_of(frame, parameter)}rows {start} to {stop - 1} of a resting "
                f"weight that tensor parallelism has cut must be a weight of their own to be "
                f"sharded again: {why}, for {list(whole.shape)} in {whole.storage}; leave it to "
                "fully_shard or to parallelize_module alone" + HALF_DONE
            )
    return whole._replace(span=(first, last))


def empty_rows(rows: StowedRows, count: int, first: int | None, **device: Any) -> StowedRows:
    """Zero records, for `count` rows of the weight that `rows` belongs to."""
    records = rows._records.new_zeros((count, rows._records.shape[1]), **device)
    shared = [_there(part, device) for part in rows._shared()]
    return StowedRows(records, shared, rows._whole, [first])


def _there(part: Tensor, device: dict[str, Any]) -> Tensor:
    if not device:
        return part
    return torch.empty_like(part, **device) if part.is_meta else part.to(**device)


@row_op(aten.constant_pad_nd.default)
def _pad(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """More rows at the end, as collectives of equal shares need them."""
    rows, padding, value = (*args, kwargs.get("value", 0))[:3]
    *inner, before, after = padding
    if any(inner) or before or value or len(padding) != 2 * rows.dim():
        return NotImplemented
    return rows._like(called(rows._records, [0, 0, 0, after], 0))


@row_op(aten.copy_.default)
def _copy(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    into, values = args[:2]
    if not isinstance(into, StowedRows):
        if asked_by(sharder(), SHARDS_ONE) is not None:
            raise Unsupported(
                f"stowage: torch {torch.__version__} must make room for {values!r} with new_zeros "
                f"of its own size, got plain memory {list(into.shape)}: the shard would be dense"
                + HALF_DONE
            )
        return called(into, values.dequantize(), *args[2:])
    if initialising(into) and not takes_over(into, values):
        return initialise(called, args, kwargs)
    if not isinstance(values, StowedRows) or not _same_form(into, values):
        raise InvalidArgument(
            f"stowage: into {into!r} only rows of the same storage and shape can be copied, got "
            f"{values!r}"
        )
    called(into._records, values._records, *args[2:])
    for mine, given in zip(into._shared(), values._shared(), strict=True):
        if mine is not given:
            called(mine, given, *args[2:])
    if values.first is not None:
        into._start[0] = values.first - into._skip
    follow(into, values)
    return into


def together(rows: StowedRows) -> Tensor:
    whole = rows._whole
    if is_tagged(rows._records, whole.geometry.length) and whole.total is None:
        if (records := untagged(rows._records, whole.shape[0])) is None:
            return rows
        whole, rows = whole._replace(span=None), rows._like(records, [0])
        rows._whole = whole
    return rows.stowed() if rows._is_all() else rows


def _same_form(a: StowedRows, b: StowedRows) -> bool:
    return a._whole[:2] == b._whole[:2] and a.shape == b.shape

# SPDX-License-Identifier: Apache-2.0
"""What operators do with rows of resting weights: moves, slices, copies and collectives of records.

An operator that the table lacks computes with the weight where all rows are together, and else
dequantizes the rows that are there and is counted: `stowage.fallbacks()`.
"""

import math
from typing import Any

import torch
from torch import Tensor

from stowage._ops import _torch
from stowage._ops._torch import tree_map_only
from stowage._ops.errors import InvalidArgument, Unsupported
from stowage._shard.initialisation import follow, initialise, takes_over
from stowage._shard.pieces import Whole, is_tagged, rows_misfit, untagged
from stowage._shard.records import encode
from stowage._shard.rows import Place, StowedRows, rows_that_fit
from stowage._tensor.operators import counted_fallbacks
from stowage._tensor.stowed import StowedTensor, initialising
from stowage._tensor.tables import ROW_OPS, row_op
from stowage._tensor.views import PACKED, Packed, StowedView, source
from stowage._tensor.writes import writes

COLUMNS = "_stowage_columns"  # attribute of memory that a weight made for columns: which, in words
PREPARE = (
    "call stowage.sharding.prepare(model) before parallelize_module or distribute_tensor, so that "
    "DTensor takes its rows as they rest"
)
HALF_DONE = (
    "; the parameters before it in this fully_shard call are sharded already, and none after it: "
    "build the model again"
)
aten = torch.ops.aten


@row_op()
def _other(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if (named := ROW_OPS.get(called.name())) is not None:
        return named(called, args, kwargs)
    if writes(called):
        if any(isinstance(t, StowedRows) and initialising(t) for t in args):
            return initialise(called, args, kwargs)
        _refuse_room(called, args)
        raise Unsupported(
            f"stowage: {called} would write to rows of a resting weight that is spread over "
            "processes; write before it is sharded, or load a checkpoint"
        )
    if _torch.can_decompose(called)():
        result = called.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result

    if called.is_view:  # a write to it would be lost
        _refuse_room(called, args)

    def values(rows: StowedRows) -> Tensor:
        if (piece := rows.piece()) is not None:  # all rows, or some that blocks divide
            return piece
        counted_fallbacks[str(called)] += 1
        return rows.dequantize()

    return called(
        *tree_map_only(StowedRows, values, args), **tree_map_only(StowedRows, values, kwargs)
    )


def _refuse_room(called: Any, args: tuple[Any, ...]) -> None:
    if isinstance(args[0], StowedRows) and args[0]._place.room is not None and args[0].numel():
        raise Unsupported(
            "stowage: memory that new_zeros of a resting weight makes while torch.distributed runs "
            f"is room for rows of that weight (Shard(0)) and takes nothing else, got {called}; "
            "take torch.zeros for plain memory"
        )


# --- the same rows in another place ---------------------------------------------------------------


def view_of(rows: StowedRows, records: Tensor, skip: int = 0) -> StowedRows:
    """Some of `rows`, in the same memory and with the same knowledge of its place."""
    return StowedRows(records, rows._shared(), rows._whole, rows._place, rows._skip + skip)


@row_op(aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def _alias(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return view_of(args[0], args[0]._records)


@row_op(aten.clone.default)
def _clone(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows = args[0]
    shared = [part.clone() for part in rows._shared()]
    return StowedRows(rows._records.clone(), shared, rows._whole, rows._place.at(rows.first))


@row_op(aten._to_copy.default, aten._pin_memory.default)
def _move(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Records and shared parts move; a floating dtype becomes the compute dtype."""
    rows, dtype = args[0], kwargs.get("dtype") or args[0].dtype
    if not dtype.is_floating_point:
        return NotImplemented
    where = {k: v for k, v in kwargs.items() if k in ("device", "pin_memory", "non_blocking")}
    records, *shared = (called(part, *args[1:], **where) for part in _inner(rows))
    whole, place = rows._whole._replace(dtype=dtype), rows._place.at(rows.first)
    moved = StowedRows(records, shared, whole, place)
    place.origin = rows._origin and rows._origin.at(moved.device)
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
    return together(piece) if padded else piece


@row_op(aten.split.Tensor, aten.split_with_sizes.default)
def _split(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows, sizes, dim = (*args, kwargs.get("dim", 0))[:3]
    if dim % rows.dim():
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
        given = together(view_of(rows, rows._records))
        if isinstance(given, StowedTensor):
            given._prepared = None
            given._given = True
        return given
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
    if rows._whole.total is not None and count is None and len(size) == 2 and size[1] == 0:
        raise Unsupported(  # DTensor fills up with such, where it has fewer chunks than processes
            f"stowage: {rows._place.name}: a resting weight can be sharded along dim 1 only where "
            f"the processes divide its columns, for {list(rows._whole.uncut)}; use Shard(0)"
        )
    if count is None or kwargs.get("dtype") not in (None, rows.dtype):
        dtype, device = (kwargs.get(name) or getattr(rows, name) for name in ("dtype", "device"))
        plain = torch.zeros if called is aten.new_zeros.default else torch.empty
        return plain(size, dtype=dtype, device=device)
    device = {"device": kwargs["device"]} if kwargs.get("device") else {}
    made = empty_rows(rows, count, rows.first if like else None, **device)
    if called is aten.new_zeros.default and count <= rows.shape[0] and (count or not len(rows)):
        made._whole = _spread(rows)
    made._place.origin = rows._origin and rows._origin.unset()
    return made


def _spread(rows: StowedRows) -> Whole:
    """Of rows that FSDP2 spreads, though DTensor has left others elsewhere: only these come back.
    It asks for room for no more than there are; for more, where it fills up what it has spread, and
    DTensor for room for none."""
    whole = rows._whole
    first, last = rows.first or 0, (rows.first or 0) + rows.shape[0]
    if (first, last) == (0, whole.shape[0]) or whole.span is not None:
        return whole
    if misfit := rows._place.misfit:  # of any process, so that all refuse alike
        start, stop = misfit
        why = rows_misfit(whole.storage, whole.shape, start, stop)
        raise Unsupported(
            f"stowage: {rows._place.name}: rows {start} to {stop - 1} of a resting weight that "
            f"tensor parallelism has cut must be a weight of their own to be sharded again: {why}, "
            f"for {list(whole.shape)} in {whole.storage}; leave it to fully_shard or to "
            "parallelize_module alone" + HALF_DONE
        )
    return whole._replace(span=(first, last))


def empty_rows(rows: StowedRows, count: int, first: int | None, **device: Any) -> StowedRows:
    """Zero records, for `count` rows of the weight that `rows` belongs to."""
    records = rows._records.new_zeros((count, rows._records.shape[1]), **device)
    shared = [_there(part, device) for part in rows._shared()]
    return StowedRows(records, shared, rows._whole, rows._place.at(first))


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
    return rows._like(called(rows._records, [0, 0, 0, after], 0), rows.first)


@row_op(aten.copy_.default)
def _copy(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    into, values = args[:2]
    if not isinstance(into, StowedRows):
        refuse_columns(into)
        return called(into, values.dequantize(), *args[2:])
    if isinstance(values, PACKED) and into._place.room is not None:
        values = _rows_at(values, into)
    if initialising(into) and not takes_over(into, values):
        return initialise(called, args, kwargs)
    if not isinstance(values, StowedRows) or not _same_form(into, values):
        raise InvalidArgument(
            f"stowage: into {into!r} only rows of the same storage and shape can be copied, got "
            f"{values!r}; take torch.zeros for plain memory"
        )
    called(into._records, values._records, *args[2:])
    for mine, given in zip(into._shared(), values._shared(), strict=True):
        if mine is not given:
            called(mine, given, *args[2:])
    if values.first is not None:
        into._place.first = values.first - into._skip
    into._place.room = None
    follow(into, values)
    return into


def _rows_at(values: Packed, into: StowedRows) -> Tensor:
    """The rows of the weight that `into` is room for which a slice or a view shows, as records;
    `values` where it shows something else."""
    room, columns = into._place.room, math.prod(into.shape[1:])
    weight: StowedTensor = values._weight if isinstance(values, StowedView) else values
    root = source(values)[0]
    if room is None or root._parts()[0] is not room.codes() or not values.is_contiguous():
        return values
    sizes = {tuple(t.shape[1:]) for t in (values, weight, into)}
    if len(sizes) > 1 or values.dtype != into.dtype or not columns:
        return values
    offset = int(values.storage_offset())
    start = (offset - int(weight.storage_offset())) // columns
    first, rest = divmod(offset - room.offset, columns)
    count, total = values.shape[0], into._whole.shape[0]
    if rest or not 0 <= first <= first + count <= total:
        return values
    records = encode(weight._parts(), weight._storage, weight.shape, start, start + count)
    rows = StowedRows(records, into._shared(), into._whole, Place(first))
    rows._parent = into._origin and into._origin.made_for()
    return rows


def refuse_columns(memory: Tensor) -> None:
    """Raises Unsupported where FSDP2 copies columns into memory that a weight has made for them."""
    if (asked := getattr(memory.untyped_storage(), COLUMNS, None)) is not None:
        raise Unsupported(
            "stowage: a resting weight must be sharded along dim 0, whose rows have records of "
            f"their own, got {asked}; use Shard(0) or Replicate" + HALF_DONE
        )


def together(rows: StowedRows) -> Tensor:
    """The weight, where all of its rows are there, for DTensor to cut again; else `rows`."""
    whole = rows._whole
    if is_tagged(rows._records, whole.geometry.length) and whole.total is None:
        if (records := untagged(rows._records, whole.shape[0])) is None:
            return rows
        whole, rows = whole._replace(span=None), rows._like(records, 0)
        rows._whole = whole
    if not rows._is_all():
        return rows
    weight = rows.stowed()
    weight._prepared = rows._place.name
    return weight


def _same_form(a: StowedRows, b: StowedRows) -> bool:
    return a._whole[:2] == b._whole[:2] and a.shape == b.shape

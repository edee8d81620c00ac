# SPDX-License-Identifier: Apache-2.0
"""What FSDP2 and DTensor ask of a resting weight when they shard it.

FSDP2 asks for room, by `new_zeros`, and copies a slice of rows into it: that needs nothing of the
user. DTensor asks for no such room; a weight that `prepare` has marked is cut into rows for it.
What the tensors are decides, never who calls. docs/sharding.md lists the operators.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stowage._ops.errors import Unsupported
from stowage._ops.memory import octets
from stowage._shard.pieces import columns_misfit, columns_of, rows_misfit
from stowage._shard.row_operators import COLUMNS, empty_rows, refuse_columns
from stowage._shard.rows import Room, StowedRows, rows_of
from stowage._tensor.stowed import StowedTensor
from stowage._tensor.tables import earlier_op, op
from stowage._tensor.views import PACKED, StowedView, alias, outside_inference, source

_ROWS = "records are of rows"
aten = torch.ops.aten


# --- memory for some of a weight ------------------------------------------------------------------


@earlier_op(aten.new_zeros.default)
def _new_zeros(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """How FSDP2 asks for room: as many rows as the first process has."""
    weight, size = args
    if type(weight) is not StowedTensor or any(kwargs.values()) or not _may_be_sharded():
        return NotImplemented
    if len(size) != weight.dim() or not weight.dim() or size[0] > weight.shape[0]:
        return NotImplemented
    if tuple(size[1:]) == tuple(weight.shape[1:]):
        return _room(weight, size[0])
    if size[0] == weight.shape[0]:  # as it asks for columns, which it must not get
        made = torch.zeros(size, dtype=weight._dt, device=weight.device)
        dim = next(d for d, n in enumerate(size) if n != weight.shape[d])
        setattr(made.untyped_storage(), COLUMNS, f"Shard({dim}) for {weight!r}")
        return made
    return NotImplemented


@earlier_op(aten.empty_like.default)
def _empty_like(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """How DTensor asks for memory to scatter to: as a chunk of rows."""
    piece = args[0]
    is_cut = type(piece) is StowedView or (type(piece) is StowedTensor and piece._root is not None)
    if not is_cut or any(kwargs.values()) or not _may_be_sharded():
        return NotImplemented
    weight = source(piece)[0]
    rows = piece.dim() == weight.dim() and piece.shape[1:] == weight.shape[1:]
    return _room(weight, piece.shape[0]) if rows and weight.dim() else NotImplemented


def _may_be_sharded() -> bool:
    return dist.is_available() and dist.is_initialized() and not torch.compiler.is_compiling()


def _room(weight: StowedTensor, count: int) -> StowedRows:
    """Memory for rows of the weight, which takes nothing else and reads as zeros until then."""
    rows = empty_rows(rows_of(weight, 0, 0), count, None)
    rows._place.room = Room.of(weight)
    if weight._origin is not None:  # that of no rows, until they are copied
        rows._place.origin = weight._origin.of_rows(0, 0, rows.numel())
    return rows


@earlier_op(aten.copy_.default)
def _copy(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    into, values = args[:2]
    if type(values) is StowedView and not isinstance(into, PACKED):
        refuse_columns(into)
    return NotImplemented


# --- chunks of a weight that is prepared ----------------------------------------------------------


@earlier_op(aten.split.Tensor)
def _split(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.chunk comes as this."""
    weight, each, dim = (*args, kwargs.get("dim", 0))[:3]
    if type(weight) is not StowedTensor or weight._prepared is None or each <= 0:
        return NotImplemented
    if dim % weight.dim():
        return outside_inference(lambda: _columns(weight, dim % weight.dim(), each))
    return outside_inference(lambda: _rows(weight, each))


def _rows(weight: StowedTensor, each: int) -> list[Tensor]:
    storage, shape, count = weight._storage, weight.shape, weight.shape[0]
    spans = [(first, min(first + each, count)) for first in range(0, max(count, 1), each)]
    found = (rows_misfit(storage, shape, *span) and span for span in spans)
    misfit = next((span for span in found if span), None)
    return [rows_of(weight, *span, misfit) for span in spans]


def _columns(weight: StowedTensor, dim: int, each: int) -> list[Tensor]:
    """Pieces along dim 1, each a weight of its own, all of whose rows are there."""
    columns = weight.shape[dim]
    if each >= columns:
        return [rows_of(weight, 0, weight.shape[0])]
    parts = -(-columns // each)
    why = columns_misfit(weight._storage, weight.shape, parts) if dim == 1 else _ROWS
    if why is None and weight._origin is not None:
        why = "it has init values, which go by rows; clear_init_value first"
    if why is not None:
        raise Unsupported(
            f"stowage: {weight._prepared}: a resting weight can be sharded along dim {dim} only "
            f"where blocks allow it: {why}, for {weight!r}; use Shard(0) (ColwiseParallel) or "
            "Replicate"
        )
    pieces: list[Tensor] = []
    for first in range(0, columns, each):
        cut = columns_of(weight, first, first + each)
        cut._prepared = weight._prepared
        piece = rows_of(cut, 0, weight.shape[0])
        piece._whole = piece._whole._replace(total=columns)
        pieces.append(piece)
    return pieces


# --- the whole weight, as it is -------------------------------------------------------------------


@op(aten.as_strided.default)
def _as_strided(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """FSDP2 cuts padding off like this."""
    t, size, stride, offset = (*args, kwargs.get("storage_offset"))[:4]
    whole = tuple(size) == tuple(t.shape) and tuple(stride) == t.stride()
    if type(t) is not StowedTensor or not whole or offset not in (None, t.storage_offset()):
        return NotImplemented
    return alias(t)


@op(aten.view.default)
def _view(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same shape: how DTensor gives a tensor away, to those who want slices of a chunk."""
    t, size = args
    if type(t) is not StowedTensor or tuple(size) != tuple(t.shape):
        return NotImplemented
    given = alias(t)
    given._prepared = None
    return given


@op(torch.ops.c10d.broadcast_.default)
def _broadcast(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The bytes of one process's weights to all: how DTensor replicates."""
    tensors, *how = args
    for weight in tensors:
        before = [p.clone() for p in weight._parts()] if weight._origin is not None else []
        parts = [p if p.untyped_storage().resizable() else p.clone() for p in weight._parts()]
        weight._set_parts(parts, weight.shape)  # a file's mapping must not be written to
        for part in parts:
            _, work = called([octets(part)], *how)
            work.wait()
        if any(not torch.equal(octets(a), octets(b)) for a, b in zip(before, parts, strict=False)):
            weight._origin.written()
    return tensors, work

# SPDX-License-Identifier: Apache-2.0
"""What FSDP2 and DTensor ask of a resting weight when they shard it: chunks, room for one, a slice.

They call operators as anybody does, but need rows that travel. So who calls decides. Operators, not
torch functions: those a mode may keep from us.
"""

from types import FrameType
from typing import Any

import torch
from torch import Tensor

from stowage._ops.errors import Unsupported
from stowage._ops.memory import octets
from stowage._shard.callers import (
    HALF_DONE,
    SIZES_ONLY,
    asked_by,
    check_reshard,
    fsdp_parameter,
    name_of,
    sharder,
)
from stowage._shard.collectives import enter_autograd_wrapper
from stowage._shard.pieces import columns_misfit, columns_of
from stowage._shard.row_operators import empty_rows
from stowage._shard.rows import rows_of, rows_that_fit
from stowage._tensor.stowed import StowedTensor
from stowage._tensor.tables import earlier_op, op
from stowage._tensor.views import alias, outside_inference

_ROWS = "records are of rows"
aten = torch.ops.aten


@earlier_op(aten.split.Tensor)
def _split(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.chunk, which FSDP2 and DTensor call, comes as this."""
    weight, each, dim = (*args, kwargs.get("dim", 0))[:3]
    if type(weight) is not StowedTensor or (frame := sharder()) is None:
        return NotImplemented
    dim %= weight.dim()
    parameter = fsdp_parameter(frame)
    if dim and parameter is None:
        count = _chunk_count(weight, frame)
        return outside_inference(lambda: _columns(weight, dim, count, frame))
    _check_dim(weight, dim, "" if parameter is None else HALF_DONE)
    check_reshard(parameter)
    if asked_by(frame, SIZES_ONLY) is not None:
        sizes = outside_inference(lambda: torch.empty(weight.shape, device="meta"))
        return outside_inference(lambda: sizes.split(each))
    rows = weight.shape[0]
    starts = range(0, rows, each)
    return outside_inference(lambda: [rows_of(weight, i, min(i + each, rows)) for i in starts])


def _chunk_count(weight: StowedTensor, frame: FrameType) -> int:
    """For how many processes DTensor cuts, which the sizes of chunks may not tell."""
    count = frame.f_locals.get("num_chunks")
    if not isinstance(count, int):
        raise Unsupported(
            f"stowage: {frame.f_code.co_name} of this torch ({torch.__version__}) must say as "
            f"num_chunks into how many columns it cuts {weight!r}; use Shard(0) or Replicate"
        )
    return count


def _columns(weight: StowedTensor, dim: int, chunks: int, frame: FrameType) -> list[Tensor]:
    """Pieces along dim 1, each a weight of its own, all of whose rows are there."""
    if chunks == 1:
        return [rows_of(weight, 0, weight.shape[0])]
    why = columns_misfit(weight._storage, weight.shape, chunks) if dim == 1 else _ROWS
    if why is None and weight._origin is not None:
        why = "it has init values, which go by rows; clear_init_value first"
    if why is not None:
        raise Unsupported(
            f"stowage: {name_of(frame)}a resting weight can be sharded along dim {dim} only where "
            f"blocks allow it: {why}, for {weight!r}; use Shard(0) (ColwiseParallel) or Replicate"
        )
    pieces: list[Tensor] = []
    each = weight.shape[1] // chunks
    for first in range(0, weight.shape[1], each):
        piece = rows_of(columns_of(weight, first, first + each), 0, weight.shape[0])
        piece._whole = piece._whole._replace(total=weight.shape[1])
        pieces.append(piece)
    return pieces


@earlier_op(aten.slice.Tensor)
def _slice(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given: list[Any] = [*args, *(0, None, None, 1)[len(args) - 1 :]]
    weight, dim, first, last, step = given
    if type(weight) is not StowedTensor or step != 1 or sharder() is None:
        return NotImplemented
    _check_dim(weight, dim)
    start, stop, _ = slice(first, last).indices(weight.shape[0])
    return outside_inference(lambda: rows_of(weight, start, max(start, stop)))


@earlier_op(aten.new_zeros.default)
def _new_zeros(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The memory that FSDP2 copies a process's rows into, as many as the first process has."""
    weight, size = args
    asked = type(weight) is StowedTensor and not any(kwargs.values())
    if not asked or (frame := sharder()) is None:
        return NotImplemented
    count = rows_that_fit(size, weight.shape)
    if count is None:
        return NotImplemented
    rows = empty_rows(rows_of(weight, 0, 0), count, None)
    if weight._origin is not None:  # that of no rows, until they are copied
        mesh_info = getattr(fsdp_parameter(frame), "mesh_info", None)
        group = getattr(mesh_info, "shard_process_group", None)
        rows._kept = [weight._origin.of_rows(0, 0, group, rows.numel())]
    return rows


def _check_dim(weight: StowedTensor, dim: int, half_done: str = "") -> None:
    if dim % weight.dim():
        raise Unsupported(
            f"stowage: a resting weight must be sharded along dim 0, whose rows have records of "
            f"their own, got Shard({dim % weight.dim()}) for {weight!r}; use Shard(0) or Replicate"
            + half_done
        )


@op(aten.as_strided.default)
def _as_strided(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The whole weight as it is: FSDP2 cuts padding off like this."""
    t, size, stride, offset = (*args, kwargs.get("storage_offset"))[:4]
    whole = tuple(size) == tuple(t.shape) and tuple(stride) == t.stride()
    if type(t) is not StowedTensor or not whole or offset not in (None, t.storage_offset()):
        return NotImplemented
    return alias(t)


@op(aten.view.default)
def _view(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same shape: how DTensor gives a tensor away."""
    t, size = args
    return alias(t) if type(t) is StowedTensor and tuple(size) == tuple(t.shape) else NotImplemented


@op(torch.ops.c10d.broadcast_.default)
def _broadcast(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The bytes of one process's weights to all: how DTensor replicates."""
    tensors, *how = args
    for weight in tensors:
        before = [p.clone() for p in weight._parts()] if weight._origin is not None else []
        parts = [p if p.untyped_storage().resizable() else p.clone() for p in weight._parts()]
        weight._seat(parts, weight.shape)  # a file's mapping must not be written to
        for part in parts:
            _, work = called([octets(part)], *how)
            work.wait()
        if any(not torch.equal(octets(a), octets(b)) for a, b in zip(before, parts, strict=False)):
            weight._origin.written()
    return tensors, work


enter_autograd_wrapper()

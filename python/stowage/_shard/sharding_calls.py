# SPDX-License-Identifier: Apache-2.0
"""What FSDP2 and DTensor ask of a resting weight when they shard it: chunks, room for one, a slice.

They call torch functions as anybody does, but need rows that travel. So who calls decides.
"""

import sys
from typing import Any

import torch
from torch import Tensor

from stowage._errors import Unsupported
from stowage._files.source import octets
from stowage._shard.callers import HALF_DONE, check_reshard, name_of, sharder
from stowage._shard.collectives import enter_autograd_wrapper
from stowage._shard.operators import empty_rows
from stowage._shard.pieces import columns_misfit, columns_of
from stowage._shard.rows import rows_of, rows_that_fit
from stowage.registry import function, op
from stowage.tensor import StowedTensor
from stowage.views import alias

_ROWS = "records are of rows"
_compiling = torch.compiler.is_compiling
_SIZES_ONLY = "_init_sharded_post_forward_param_metadata"  # of FSDP2: asks for chunks' sizes


def _sharder() -> Any:
    """The frame of FSDP2 or DTensor that has called a torch function, if one has."""
    if _compiling():
        return None
    return sharder(3)


@function(torch.chunk)
def _chunk(input: Tensor, chunks: int, dim: int = 0) -> Any:
    if type(input) is not StowedTensor or (frame := _sharder()) is None:
        return NotImplemented
    asker = frame.f_back
    parameter = asker and asker.f_locals.get("self")  # of FSDP2, this weight not replaced yet
    fsdp = hasattr(parameter, "mesh_info")
    if dim % input.dim() and not fsdp:
        return _columns(input, dim % input.dim(), chunks, frame)
    _check_dim(input, dim, HALF_DONE if fsdp else "")
    check_reshard(parameter)
    if asker is not None and asker.f_code.co_name == _SIZES_ONLY:
        return torch.empty(input.shape, dtype=input.dtype, device="meta").chunk(chunks)
    rows = input.shape[0]
    each = max(1, -(-rows // chunks))
    return tuple(rows_of(input, at, min(at + each, rows)) for at in range(0, rows, each))


def _columns(weight: StowedTensor, dim: int, chunks: int, frame: Any) -> tuple[Tensor, ...]:
    """Pieces along dim 1, each a weight of its own, all of whose rows are there."""
    if chunks == 1:
        return (rows_of(weight, 0, weight.shape[0]),)
    why = columns_misfit(weight._storage, weight.shape, chunks) if dim == 1 else _ROWS
    if why is None and weight._origin is not None:
        why = "it has init values, which go by rows; clear_init_value first"
    if why is not None:
        raise Unsupported(
            f"stowage: {name_of(frame)}a resting weight can be sharded along dim {dim} only where "
            f"blocks allow it: {why}, for {weight!r}; use Shard(0) (ColwiseParallel) or Replicate"
        )
    pieces, each = [], weight.shape[1] // chunks
    for first in range(0, weight.shape[1], each):
        piece = rows_of(columns_of(weight, first, first + each), 0, weight.shape[0])
        piece._whole = piece._whole._replace(total=weight.shape[1])
        pieces.append(piece)
    return tuple(pieces)


@function(torch.narrow, Tensor.narrow)
def _narrow(input: Tensor, dim: int, start: Any, length: int) -> Any:
    if type(input) is not StowedTensor or _sharder() is None:
        return NotImplemented
    _check_dim(input, dim)
    return rows_of(input, int(start), int(start) + length)


@function(Tensor.new_zeros)
def _new_zeros(self: Tensor, *size: Any, **kwargs: Any) -> Any:
    """The memory that FSDP2 copies a process's rows into, as many as the first process has."""
    if type(self) is not StowedTensor or kwargs or len(size) != 1 or _sharder() is None:
        return NotImplemented
    count = rows_that_fit(size[0], self.shape)
    if count is None:
        return NotImplemented
    rows = empty_rows(rows_of(self, 0, 0), count, None)
    if self._origin is not None:  # that of no rows, until they are copied
        mesh_info = getattr(sys._getframe(2).f_locals.get("self"), "mesh_info", None)
        group = getattr(mesh_info, "shard_process_group", None)
        rows._kept = [self._origin.of_rows(0, 0, group, rows.numel())]
    return rows


def _check_dim(weight: StowedTensor, dim: int, half_done: str = "") -> None:
    if dim % weight.dim():
        raise Unsupported(
            f"stowage: a resting weight must be sharded along dim 0, whose rows have records of "
            f"their own, got Shard({dim % weight.dim()}) for {weight!r}; use Shard(0) or Replicate"
            + half_done
        )


@op(torch.ops.aten.as_strided.default)
def _as_strided(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The whole weight as it is: FSDP2 cuts padding off like this."""
    t, size, stride, offset = (*args, kwargs.get("storage_offset"))[:4]
    whole = tuple(size) == tuple(t.shape) and tuple(stride) == t.stride()
    if type(t) is not StowedTensor or not whole or offset not in (None, t.storage_offset()):
        return NotImplemented
    return alias(t)


@op(torch.ops.aten.view.default)
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

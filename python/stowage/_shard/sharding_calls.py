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
from stowage._shard.operators import empty_rows, enter_autograd_wrapper
from stowage._shard.resharding import RESHARD
from stowage._shard.rows import rows_of, rows_that_fit
from stowage.registry import function, op
from stowage.tensor import StowedTensor
from stowage.views import alias

_compiling = torch.compiler.is_compiling
_SHARDS = ("torch.distributed.fsdp._fully_shard.", "torch.distributed.tensor.placement_types")
_SIZES_ONLY = "_init_sharded_post_forward_param_metadata"  # of FSDP2: asks for chunks' sizes
_HALF_DONE = (
    "; the parameters before it in this fully_shard call are sharded already, and none after it: "
    "build the model again"
)


def _sharder() -> Any:
    """The frame of FSDP2 or DTensor that has called a torch function, if one has."""
    if _compiling():
        return None
    frame = sys._getframe(3)
    name = frame.f_globals.get("__name__", "")
    return frame if name.startswith(_SHARDS) else None


@function(torch.chunk)
def _chunk(input: Tensor, chunks: int, dim: int = 0) -> Any:
    if type(input) is not StowedTensor or (frame := _sharder()) is None:
        return NotImplemented
    asker = frame.f_back
    parameter = asker and asker.f_locals.get("self")  # of FSDP2, this weight not replaced yet
    _check_dim(input, dim, _HALF_DONE if hasattr(parameter, "mesh_info") else "")
    _check_reshard(parameter)
    if asker is not None and asker.f_code.co_name == _SIZES_ONLY:
        return torch.empty(input.shape, dtype=input.dtype, device="meta").chunk(chunks)
    rows = input.shape[0]
    each = max(1, -(-rows // chunks))
    return tuple(rows_of(input, at, min(at + each, rows)) for at in range(0, rows, each))


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


def _check_reshard(parameter: Any) -> None:
    """Of FSDP2; DTensor has no such meshes."""
    after, mesh = (getattr(parameter, f"{name}mesh_info", None) for name in ("post_forward_", ""))
    if after is not None and after is not mesh and after != mesh:
        raise Unsupported(f"stowage: {RESHARD}{_HALF_DONE}")


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

# SPDX-License-Identifier: Apache-2.0
"""What a process has of a weight that DTensor cuts along dim 0, such as the experts of its part of
a mesh, where the weight rests in a file: a weight of its own over the bytes of those rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from stowage._ops import _torch
from stowage._ops.errors import InvalidArgument
from stowage._shard.groups import shard_dim
from stowage._shard.local_shards import is_spread
from stowage._shard.pieces import Whole
from stowage._shard.records import encode
from stowage._shard.rows import Place, StowedRows, rests
from stowage._tensor.slices import rows_of_parts
from stowage._tensor.stowed import StowedTensor


def fully_sharded(model: nn.Module) -> frozenset[int]:
    """The ids of the parameters that FSDP2 gathers."""
    states = (_torch.fsdp_state(module) for module in model.modules())
    groups = (group for state in states for group in _torch.fsdp_groups(state))
    return frozenset(id(held.sharded_param) for group in groups for held in group.fsdp_params)


def obstacle_to_file(spread: Any, rests_there: bool, gathered: frozenset[int]) -> str:
    """Why a DTensor cannot have its rows in a file; "" if it can. `rests_there`: whether the file
    has it at rest. `gathered`: `fully_sharded`."""
    if rests(spread) and not rests_there:
        return "must rest in the file, to stay there with ram (stowage pack writes such a file)"
    if id(spread) in gathered or spread.device_mesh.device_type != "cpu":
        return "must be on the CPU and spread by no fully_shard, to rest in a file with ram"
    dims = [dim for place in spread.placements if (dim := shard_dim(place)) is not None]
    if any(dims) or len(dims) > 1:
        return f"must be cut along dim 0 alone, to rest in a file with ram, got {spread.placements}"
    return ""


def rows_here(spread: Any) -> StowedRows:
    """Of one of those, what is here as rows of the whole: copies."""
    local: StowedTensor = _torch.local_of(spread)
    parts, storage = local._parts(), local._storage
    whole = Whole(storage, tuple(spread.shape), local._dt, local._exact)
    records = encode(parts, storage, local.shape, 0, local.shape[0])
    return StowedRows(records, parts[storage.in_rows :], whole, Place(_first(spread)))


def like_spread(spread: Any, local: Tensor, requires_grad: bool) -> nn.Parameter:
    """A parameter that is spread as `spread` is, of which `local` is here."""
    from torch.distributed.tensor import DTensor  # takes a second, and is there if `spread` is

    made = DTensor.from_local(
        local,
        spread.device_mesh,
        spread.placements,
        run_check=False,
        shape=spread.shape,
        stride=spread.stride(),
    )
    return nn.Parameter(made, requires_grad=requires_grad)


def own_matrices(whole: Tensor, spread: Tensor) -> Tensor:
    """What is here of `whole`, in the place of `spread`; `whole` itself where that is no DTensor.
    Parts in a file are left there, other values copied.

    Raises InvalidArgument where blocks or scales run on across the first or last row here.
    """
    if not is_spread(spread):
        return whole
    of: Any = spread
    sizes, offsets = _torch.compute_local_shape_and_global_offset(
        of.shape, of.device_mesh, of.placements
    )
    first, last = (offsets[0], offsets[0] + sizes[0]) if sizes else (0, 0)
    detached = whole.detach()
    if isinstance(whole, StowedTensor):
        parts = rows_of_parts(whole._parts(), whole._storage, whole.shape, first, last)
        if parts is None:
            raise InvalidArgument(
                f"must rest so that rows {first} to {last} have blocks of their own, to rest in a "
                f"file with ram, is {whole.resting} {list(whole.shape)}"
            )
        local: Tensor = whole._like(parts, shape=(last - first, *whole.shape[1:]))
        local._plain = whole._plain  # type: ignore[attr-defined]
    else:
        local = detached[first:last].clone() if sizes else detached
    return like_spread(spread, local, whole.requires_grad)


def is_exact(tensor: Any) -> bool:
    """Whether a weight that rests, or what is here of it, computes as torch does."""
    local = _torch.local_of(tensor)
    if isinstance(local, StowedRows):
        return local._whole.exact
    return isinstance(local, StowedTensor) and local._exact


def matrices_here(tensor: Any) -> tuple[StowedTensor, int] | None:
    """Of a stack that rests, or is spread so, what is here, and the number of the first of it."""
    local = _torch.local_of(tensor)
    if not isinstance(local, StowedTensor):
        return None
    if local is tensor or local.shape[0] == tensor.shape[0]:
        return local, 0
    return local, _first(tensor)


def _first(spread: Any) -> int:
    """The number of the first row here."""
    _, offsets = _torch.compute_local_shape_and_global_offset(
        spread.shape, spread.device_mesh, spread.placements
    )
    return int(offsets[0])

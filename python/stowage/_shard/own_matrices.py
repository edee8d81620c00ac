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


def gathered(model: nn.Module) -> frozenset[int]:
    """The ids of the parameters that FSDP2 gathers from several processes."""
    states = (_torch.fsdp_state(module) for module in model.modules())
    groups = (group for state in states for group in _torch.fsdp_groups(state))
    every = (held for group in groups for held in group.fsdp_params)
    return frozenset(id(held.sharded_param) for held in every if _is_gathered(held))


def _is_gathered(held: Any) -> bool:
    """Not where it has but one process to gather from, as experts of whole expert parallelism."""
    return bool(getattr(_torch.fsdp_mesh_info(held), "shard_mesh_size", 1) > 1)


def let_go(model: nn.Module, ids: frozenset[int]) -> None:
    """Takes parameters that FSDP2 does not gather, by their ids, out of what it copies before each
    forward: the modules hold what is put into their places."""
    for module in model.modules():
        _torch.let_go(_torch.fsdp_state(module), ids)


def left_in_file(spread: Any, gathered: frozenset[int]) -> bool:
    """Whether a DTensor may have its rows in a file: matrices of a stack, cut along dim 0 alone.
    Others are gathered, cut or multiplied by torch, which has to have them in memory. `gathered`:
    the ids of what FSDP2 gathers."""
    dims = [dim for place in _cuts(spread) if (dim := shard_dim(place)) is not None]
    return id(spread) not in gathered and spread.dim() > 2 and not any(dims) and len(dims) < 2


def _cuts(spread: Any) -> list[Any]:
    """Its placements, where a dimension of its mesh with one process cuts nothing."""
    from torch.distributed.tensor import Replicate  # takes a second, and is there if `spread` is

    mesh = spread.device_mesh
    return [p if mesh.size(i) > 1 else Replicate() for i, p in enumerate(spread.placements)]


def obstacle_to_file(spread: Any, rests_there: bool) -> str:
    """Why such a DTensor cannot have its rows in this file; "" if it can. `rests_there`: whether
    the file has it at rest."""
    if rests(spread) and not rests_there:
        return "must rest in the file, to stay there with ram (stowage pack writes such a file)"
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
    from torch.distributed.tensor import DTensor  # as above

    made = DTensor.from_local(
        local,
        spread.device_mesh,
        _cuts(spread),
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
        of.shape, of.device_mesh, _cuts(of)
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

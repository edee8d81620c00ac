# SPDX-License-Identifier: Apache-2.0
"""Who has the other pieces of a tensor that is spread over a mesh: one group for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

_joint: dict[tuple[int, ...], Any] = {}  # groups that were made here, by their ranks


def shard_dim(placement: Any) -> int | None:
    """The dimension that a placement cuts. FSDP2 says `_StridedShard` where tensor parallelism has
    cut it before; of that one torch's `is_shard()` is False."""
    if placement.is_shard() or type(placement).__name__ == "_StridedShard":
        return int(placement.dim)
    return None


def groups_of(tensor: Any) -> tuple[Any, ...]:
    """The group of the processes over which a DTensor is spread: one, whatever the number of mesh
    dimensions, or none. The first call for such a mesh makes it: all of its processes must call."""
    mesh = tensor.device_mesh
    cut = [i for i, place in enumerate(tensor.placements) if shard_dim(place) is not None]
    dims = [i for i in cut if mesh.size(i) > 1]
    if len(dims) < 2:
        return tuple(mesh.get_group(dim) for dim in dims)
    ranks = _ranks(mesh, dims)
    if len(ranks) == dist.get_world_size():
        return (dist.group.WORLD,)
    if not _lives(_joint.get(ranks)):
        _joint[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
    return (_joint[ranks],)


def _ranks(mesh: Any, dims: Sequence[int]) -> tuple[int, ...]:
    """Those that differ from this process along `dims` only."""
    here = mesh.get_coordinate()
    place = tuple(slice(None) if i in dims else here[i] for i in range(mesh.ndim))
    return tuple(sorted(mesh.mesh[place].flatten().tolist()))


def _lives(group: Any) -> bool:
    """Not one of a torch.distributed that was shut down since."""
    if group is None:
        return False
    try:
        return bool(dist.get_process_group_ranks(group))
    except (KeyError, ValueError):
        return False

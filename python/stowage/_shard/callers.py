# SPDX-License-Identifier: Apache-2.0
"""Who calls: FSDP2 and DTensor shard by operators that anybody calls, but need rows that travel."""

from __future__ import annotations

import functools
import sys
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from stowage._ops import _torch
from stowage._ops.errors import Unsupported
from stowage._shard.resharding import RESHARD
from stowage._tensor.frames import above, module_of, nearest

_SHARDS = ("torch.distributed.fsdp._fully_shard.", "torch.distributed.tensor.placement_types")
_LIBRARIES = ("torch.distributed.fsdp.", "torch.distributed.tensor.")
_FSDP_PARAMETER = "torch.distributed.fsdp._fully_shard._fsdp_param"
_PLAN = "torch.distributed.tensor.parallel.api"
# Without these, another torch shards by code that would not be known for what it is.
_KNOWN = {
    _LIBRARIES[0]: ((_FSDP_PARAMETER, "FSDPParam._init_sharded_param"),),
    _LIBRARIES[1]: (("torch.distributed.tensor.placement_types", "Shard._shard_tensor"),),
}
SHARDS_ONE = "_init_sharded_param"  # method of FSDP2's parameters: makes what a process keeps
SIZES_ONLY = "_init_sharded_post_forward_param_metadata"  # asks for chunks' sizes
HALF_DONE = (
    "; the parameters before it in this fully_shard call are sharded already, and none after it: "
    "build the model again"
)


def sharder() -> FrameType | None:
    """The frame of FSDP2 or DTensor that calls the operator which runs, if one does.

    Raises Unsupported where a torch calls whose sharding code has other names than are known."""
    if torch.compiler.is_compiling() or not (dist.is_available() and dist.is_initialized()):
        return None
    frame = nearest("torch.distributed.")
    if frame is None or (name := module_of(frame)).startswith(_SHARDS):
        return frame
    for library in _LIBRARIES:
        if name.startswith(library) and (missing := _missing(library)):
            asked = f"{frame.f_code.co_name} of {name} asks for a piece of a resting weight"
            raise _torch.lacks(missing, f"sharding is known, and {asked}")
    return None


@functools.cache
def _missing(library: str) -> str:
    """The first of the known names that this torch lacks; "" if it has all."""
    for module, names in _KNOWN[library]:
        found: Any = sys.modules.get(module)
        for name in names.split("."):
            found = getattr(found, name, None)
        if found is None:
            return f"{module}.{names}"
    return ""


def fsdp_parameter(frame: FrameType | None) -> Any:
    """The parameter of FSDP2 that is being sharded around this frame, and not replaced yet."""
    for each in above(frame):
        if module_of(each) == _FSDP_PARAMETER and hasattr(each.f_locals.get("self"), "mesh_info"):
            return each.f_locals["self"]
        if each.f_code.co_name == SHARDS_ONE and "mesh_info" not in each.f_code.co_names:
            raise _torch.lacks("FSDPParam.mesh_info", "the mesh is known over which FSDP2 shards")
        if not module_of(each).startswith(_SHARDS):
            return None
    return None


def asked_by(frame: FrameType | None, function: str) -> FrameType | None:
    """The frame of this method of FSDP2's parameters around `frame`, if that is who asks."""
    for each in above(frame):
        if module_of(each) == _FSDP_PARAMETER and each.f_code.co_name == function:
            return each
    return None


def name_of(frame: FrameType | None, parameter: Any = None) -> str:
    """What the caller of `fully_shard` or `parallelize_module` may know the weight by."""
    if parameter is not None:
        info = _torch.module_info(parameter)
        return f"{info.param_name} of {type(info.module).__name__}: "
    for each in above(frame):
        if module_of(each) == _PLAN and "module_path" in each.f_locals:
            return f"weight of {each.f_locals['module_path']}: "
    return ""


def check_reshard(parameter: Any) -> None:
    """Of FSDP2; DTensor has no such meshes."""
    if parameter is None:
        return
    after, mesh = _torch.post_forward_mesh_info(parameter), _torch.mesh_info(parameter)
    if after is not None and after is not mesh and after != mesh:
        raise Unsupported(f"stowage: {RESHARD}{HALF_DONE}")

# SPDX-License-Identifier: Apache-2.0
"""Who calls: FSDP2 and DTensor shard by functions that anybody calls, but need rows that travel."""

from __future__ import annotations

import sys
from typing import Any

from stowage._errors import Unsupported
from stowage._shard.resharding import RESHARD

_SHARDS = ("torch.distributed.fsdp._fully_shard.", "torch.distributed.tensor.placement_types")
_FSDP_PARAMETER = "_init_sharded_param"  # of FSDP2: makes what a process keeps of a parameter
_PLAN = "torch.distributed.tensor.parallel.api"
_DEEPEST = 40  # frames that are looked at
HALF_DONE = (
    "; the parameters before it in this fully_shard call are sharded already, and none after it: "
    "build the model again"
)


def sharder(depth: int) -> Any:
    """The frame of FSDP2 or DTensor, if that is what is so many calls above the caller of this."""
    frame = sys._getframe(depth + 1)
    name = frame.f_globals.get("__name__", "")
    return frame if name.startswith(_SHARDS) else None


def fsdp_parameter(frame: Any) -> Any:
    """The parameter of FSDP2 that is being sharded in this frame of it."""
    ours = frame is not None and frame.f_code.co_name == _FSDP_PARAMETER
    return frame.f_locals.get("self") if ours else None


def name_of(frame: Any, parameter: Any = None) -> str:
    """What the caller of `fully_shard` or `parallelize_module` may know the weight by."""
    if parameter is not None:
        info = parameter._module_info
        return f"{info.param_name} of {type(info.module).__name__}: "
    for _ in range(_DEEPEST):
        if frame is None:
            return ""
        if frame.f_globals.get("__name__") == _PLAN and "module_path" in frame.f_locals:
            return f"weight of {frame.f_locals['module_path']}: "
        frame = frame.f_back
    return ""


def check_reshard(parameter: Any) -> None:
    """Of FSDP2; DTensor has no such meshes."""
    after, mesh = (getattr(parameter, f"{name}mesh_info", None) for name in ("post_forward_", ""))
    if after is not None and after is not mesh and after != mesh:
        raise Unsupported(f"stowage: {RESHARD}{HALF_DONE}")

# SPDX-License-Identifier: Apache-2.0
"""`reshard_after_forward` as an int, impossible in FSDP2 for weights that say what travels."""

from collections.abc import Iterable

from torch import nn

from stowage._ops import _torch
from stowage._ops.errors import Unsupported

RESHARD = (
    "reshard_after_forward must be True or False for modules whose weights travel in a form of "
    "their own, which torch cannot spread over a smaller mesh, got an int"
)


def reshard_problems(model: nn.Module) -> list[str]:
    """The modules of `model` that were sharded with an int, named. Asks no other process."""
    return _problems(model.named_modules())


def check_resharding() -> None:
    """Looks at every module that FSDP2 shards, before rows travel for the first time: what gathers
    them is known to FSDP2 alone. Raises Unsupported, the same in each process."""
    modules = list(_torch.module_state_mapping)
    if problems := _problems((type(module).__name__, module) for module in modules):
        raise Unsupported("stowage: " + "; ".join(problems))
    for module in modules:
        for group in _torch.fsdp_groups(_torch.fsdp_state(module)):
            for parameter in group.fsdp_params:
                place = getattr(_torch.sharded_local_tensor(parameter), "_place", None)
                if place is not None:
                    place.gathered = True


def _problems(modules: Iterable[tuple[str, nn.Module]]) -> list[str]:
    problems = []
    for name, module in modules:
        for group in _torch.fsdp_groups(_torch.fsdp_state(module)):
            parts = (_torch.sharded_local_tensor(parameter) for parameter in group.fsdp_params)
            own = any(hasattr(part, "fsdp_pre_all_gather") for part in parts)
            if own and _torch.use_post_forward_mesh(group):
                problems.append(f"{name or type(module).__name__}: {RESHARD}")
    return problems

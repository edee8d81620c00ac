# SPDX-License-Identifier: Apache-2.0
"""`reshard_after_forward` as an int, impossible in FSDP2 for weights that say what travels."""

from typing import Any

from torch import nn

from stowage._ops import _torch

RESHARD = (
    "reshard_after_forward must be True or False for modules whose weights travel in a form of "
    "their own, which torch cannot spread over a smaller mesh, got an int"
)


def reshard_problems(model: nn.Module) -> list[str]:
    """The modules of `model` that were sharded with an int, named. Asks no other process."""
    problems = []
    for name, module in model.named_modules():
        for group in groups_of(module):
            parts = (_torch.sharded_local_tensor(parameter) for parameter in group.fsdp_params)
            own = any(hasattr(part, "fsdp_pre_all_gather") for part in parts)
            if own and _torch.use_post_forward_mesh(group):
                problems.append(f"{name or type(module).__name__}: {RESHARD}")
    return problems


def groups_of(module: nn.Module) -> list[Any]:
    """What FSDP2 gathers together for this module."""
    state = _torch.fsdp_state(module)
    return [] if state is None else _torch.fsdp_groups(state)

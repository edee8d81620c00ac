# SPDX-License-Identifier: Apache-2.0
"""What torch's gathers cannot do with fp8 weights, found before one of them runs."""

from torch import nn

from stowage._errors import raise_problems


def check(model: nn.Module) -> None:
    """Raises InvalidArgument that names the modules whose sharding cannot work; the first gather
    does so too, on every rank."""
    problems = []
    for name, module in model.named_modules():
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            groups = [group for group in [getattr(state, "_fsdp_param_group", None)] if group]
        after = [(group.mesh_info, group.post_forward_mesh_info) for group in groups]
        if any(kept is not None and kept is not whole for whole, kept in after):
            problems.append(
                f"module {name or '(the model)'} must be given reshard_after_forward=True or "
                "False, got a number, which torch does not support for weights that are cast "
                "before they are gathered"
            )
    raise_problems("stowage", problems)

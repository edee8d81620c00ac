# SPDX-License-Identifier: Apache-2.0
"""What may take the place of a resting parameter: no DTensor that holds its dense values, and no
copy that DataParallel makes.

torch calls hooks for each parameter and module that a module is about to hold. So what was not
prepared for tensor parallelism ends with an error, not with a model that is four times as large.
FSDP2 calls none: a module remembers which of its parameters rested, and `widened` compares.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from stowage._ops import _torch
from stowage._ops.errors import Unsupported
from stowage._shard.local_shards import holds_matrices, is_spread
from stowage._shard.row_operators import PREPARE
from stowage._shard.rows import StowedRows
from stowage._tensor.stowed import StowedTensor
from stowage._tensor.tables import with_first_weight

_RESTED = "_stowage_rested"  # attribute of a module: its parameters that rest, name -> storage


def note(module: nn.Module, name: str, parameter: Any) -> None:
    """Remembers whether the parameter that `module` is about to hold rests. Raises Unsupported for
    one that rested and is spread as something else."""
    rested: dict[str, str] = module.__dict__.get(_RESTED, {})
    if isinstance(parameter, StowedTensor):
        module.__dict__.setdefault(_RESTED, {})[name] = parameter.resting
        if parameter._origin is not None:
            parameter._origin.owned_by(module, name)
    elif name not in rested:
        return
    elif parameter is None or not is_spread(parameter):
        del rested[name]
    elif not _holds_rest(parameter):
        raise Unsupported(
            f"stowage: {name} of {type(module).__name__} rests as {rested[name]} and must do so "
            f"where it is spread over processes, got a DTensor of {_text(parameter)}; {PREPARE}, "
            "or stowage.unstow it first if plain values are meant"
        )
    elif isinstance(local := _torch.local_tensor(parameter), StowedTensor):
        local._prepared = local._prepared or name  # redistribute may cut it


def widened(model: nn.Module) -> list[str]:
    """Parameters that rested and are spread over processes as something else: what they are."""
    return [
        f"{path}{'.' if path else ''}{name}: must be spread as it was stowed, as {storage}, got "
        + _text(parameter)
        for path, module in model.named_modules()
        for name, storage in module.__dict__.get(_RESTED, {}).items()
        if (parameter := _torch.parameters(module).get(name)) is not None
        and is_spread(parameter)
        and not _holds_rest(parameter)
    ]


def _holds_rest(spread: Any) -> bool:
    """Whether a DTensor holds records, a whole weight at rest, or some matrices of a stack, which
    are a weight of their own."""
    local: Tensor = _torch.local_tensor(spread)
    if not isinstance(local, StowedTensor):
        return isinstance(local, StowedRows)
    return local.shape == spread.shape or holds_matrices(spread)


def _text(spread: Any) -> str:
    local = _torch.local_tensor(spread)
    kind = "a slice" if isinstance(local, StowedTensor) else f"plain {local.dtype} values"
    return f"{kind} {list(local.shape)} of {list(spread.shape)}"


# --- DataParallel ---------------------------------------------------------------------------------


def _child(module: nn.Module, name: str, child: nn.Module | None) -> None:
    """Refuses the copies that `replicate` makes of each module, whose parameters it has widened in
    C++, and has DataParallel look at its model, of whose copy no module is the parent."""
    if child is None:
        return
    if isinstance(module, nn.DataParallel):
        module.register_forward_pre_hook(_one_device)
    elif _torch.is_replica(child):
        _refuse_rested(child)


def _one_device(parallel: nn.Module, inputs: Any) -> None:
    assert isinstance(parallel, nn.DataParallel)
    if len(parallel.device_ids) > 1:
        for module in parallel.module.modules():
            _refuse_rested(module)


def _refuse_rested(module: nn.Module) -> None:
    if module.__dict__.get(_RESTED):
        raise Unsupported(
            "stowage: nn.DataParallel and replicate() copy plain parameters to each device and "
            "cannot copy stowed ones; run one process for each device"
        )


with_first_weight(lambda: register_module_parameter_registration_hook(note))
with_first_weight(lambda: register_module_module_registration_hook(_child))

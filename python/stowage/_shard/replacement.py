# SPDX-License-Identifier: Apache-2.0
"""What may take the place of a resting parameter: no DTensor that holds its dense values.

torch calls a hook for each parameter that a module is about to hold. So tensor parallelism that was
not known for what it is ends with an error, not with a model that is four times as large. FSDP2
calls none: a module remembers which of its parameters rested, and `widened` compares.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from stowage._ops import _torch
from stowage._ops.errors import Unsupported
from stowage._shard.describing import is_spread
from stowage._shard.rows import StowedRows
from stowage._tensor.stowed import StowedTensor
from stowage._tensor.tables import with_first_weight

_RESTED = "_stowage_rested"  # attribute of a module: its parameters that rest, name -> storage


def note(module: nn.Module, name: str, parameter: Any) -> None:
    """Remembers whether the parameter that `module` is about to hold rests. Raises Unsupported for
    one that rested and is spread as something else."""
    rested: dict[str, str] = module.__dict__.get(_RESTED, {})
    if isinstance(parameter, StowedTensor):
        module.__dict__.setdefault(_RESTED, {})[name] = parameter.storage
    elif name not in rested:
        return
    elif parameter is None or not is_spread(parameter):
        del rested[name]
    elif not _rests(parameter):
        raise Unsupported(
            f"stowage: {name} of {type(module).__name__} rests as {rested[name]} and must do so "
            f"where it is spread over processes, got a DTensor of {_text(parameter)}; "
            "stowage.unstow it first if that is meant"
        )


def widened(model: nn.Module) -> list[str]:
    """Parameters that rested and are spread over processes as something else: what they are."""
    return [
        f"{path}{'.' if path else ''}{name}: must be spread as it was stowed, as {storage}, got "
        + _text(parameter)
        for path, module in model.named_modules()
        for name, storage in module.__dict__.get(_RESTED, {}).items()
        if (parameter := _torch.parameters(module).get(name)) is not None
        and is_spread(parameter)
        and not _rests(parameter)
    ]


def _rests(spread: Any) -> bool:
    """Whether a DTensor holds records, or a whole weight at rest."""
    local: Tensor = _torch.local_tensor(spread)
    whole = isinstance(local, StowedTensor) and local.shape == spread.shape
    return whole or isinstance(local, StowedRows)


def _text(spread: Any) -> str:
    local = _torch.local_tensor(spread)
    kind = "a slice" if isinstance(local, StowedTensor) else f"plain {local.dtype} values"
    return f"{kind} {list(local.shape)} of {list(spread.shape)}"


with_first_weight(lambda: register_module_parameter_registration_hook(note))

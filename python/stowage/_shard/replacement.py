# SPDX-License-Identifier: Apache-2.0
"""What may take the place of a resting parameter: no DTensor that holds its dense values.

torch calls a hook for each parameter that a module is about to hold. So tensor parallelism that was
not known for what it is ends with an error, not with a model that is four times as large.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from stowage._errors import Unsupported
from stowage._shard.describing import is_spread
from stowage._shard.rows import StowedRows
from stowage.tensor import StowedTensor

_PLAIN = (nn.Parameter, type(None))  # of what most modules hold before


def _registered(module: nn.Module, name: str, parameter: Any) -> None:
    old: Any = module._parameters.get(name)
    if type(old) in _PLAIN or parameter is None or not is_spread(parameter):
        return
    rested = getattr(old, "_local_tensor", old)
    if isinstance(rested, (StowedTensor, StowedRows)) and not rests(parameter):
        raise Unsupported(
            f"stowage: {name} of {type(module).__name__} rests as {rested.storage} and must do so "
            f"where it is spread over processes, got a DTensor of {_text(parameter)}; "
            "stowage.unstow it first if that is meant"
        )


def rests(spread: Any) -> bool:
    """Whether a DTensor holds records, or a whole weight at rest."""
    local: Tensor = spread._local_tensor
    whole = isinstance(local, StowedTensor) and local.shape == spread.shape
    return whole or isinstance(local, StowedRows)


def _text(spread: Any) -> str:
    local = spread._local_tensor
    kind = "a slice" if isinstance(local, StowedTensor) else f"plain {local.dtype} values"
    return f"{kind} {list(local.shape)} of {list(spread.shape)}"


register_module_parameter_registration_hook(_registered)

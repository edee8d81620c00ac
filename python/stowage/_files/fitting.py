# SPDX-License-Identifier: Apache-2.0
"""Whether what a file or a state holds may go into a tensor of a model."""

from __future__ import annotations

import re

import torch
from torch import nn

from stowage._shard.describing import is_spread
from stowage.tensor import StowedTensor


def holds_values(found: torch.dtype | None, wanted: torch.dtype) -> bool:
    """Whether a plain tensor of a file can stand for one of a model. Float8 without a scale that we
    know are codes, not values."""
    if found is None or found.is_floating_point != wanted.is_floating_point:
        return False
    return found == wanted or not found.is_floating_point or found.itemsize > 1


def short(dtype: torch.dtype | None) -> str:
    return "a type unknown to torch" if dtype is None else str(dtype).removeprefix("torch.")


def declared(model: nn.Module, attribute: str, name: str) -> bool:
    """Whether the model itself (transformers) says that this name may differ."""
    return any(re.search(pattern, name) for pattern in getattr(model, attribute, None) or ())


def bound(tensor: torch.Tensor, rests: bool) -> str:
    """Why a tensor of a model cannot be filled, or replaced by one that `rests`; "" if it can."""
    if is_spread(tensor):
        return "must be whole, is spread over processes; take stowage.sharding.load"
    if rests and not isinstance(tensor, StowedTensor) and tensor.grad is not None:
        return (
            "must not be in training, has a gradient and would rest, frozen; torch's "
            "model.load_state_dict leaves it plain, zero_grad() lets it rest"
        )
    return ""

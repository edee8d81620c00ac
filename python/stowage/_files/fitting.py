# SPDX-License-Identifier: Apache-2.0
"""Whether what a file or a state holds may go into a tensor of a model."""

from __future__ import annotations

import re

import torch
from torch import nn

from stowage._files.names import Entry
from stowage._shard.describing import is_spread
from stowage._tensor.stowed import StowedTensor


def misfit(entry: Entry, wanted: torch.dtype) -> str:
    """Why a plain tensor of a file cannot stand for one of a model; "" if it can. Float8 without a
    scale that we know are codes, not values."""
    found, floating = entry.dtype, wanted.is_floating_point
    alike = found is not None and found.is_floating_point == floating
    if alike and found is not None and (found == wanted or not floating or found.itemsize > 1):
        return ""
    has = "a type unknown to torch" if found is None else str(found).removeprefix("torch.")
    why = f" (beside {entry.scaled_by}, whose meaning it does not know)" if entry.scaled_by else ""
    return (
        f"must be {str(wanted).removeprefix('torch.')} values, the file has {has} that stowage "
        f"cannot read as such{why}"
    )


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

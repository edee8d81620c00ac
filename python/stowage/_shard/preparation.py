# SPDX-License-Identifier: Apache-2.0
"""Weights that DTensor is to spread: they must say so before, since it asks for nothing of ours."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from stowage._ops.errors import InvalidArgument
from stowage._tensor.stowed import StowedTensor

Spread = TypeVar("Spread", bound=nn.Module | StowedTensor)


def prepare(model: Spread) -> Spread:
    """Lets `parallelize_module` and `distribute_tensor` spread resting weights as they rest.

    A weight that is prepared is cut into records: `torch.chunk` of it gives StowedRows, and what
    DTensor makes of these rests. Nothing is copied, and products are what they were. `fully_shard`
    alone needs no such call; before it, a call does no harm. All processes must call it alike.

    Args:
        model: a module, all of whose resting weights are prepared, or one weight.

    Returns:
        What was given.

    Raises:
        InvalidArgument: for what is neither.

    Example:
        >>> stowage.stow(model, "nf4")
        >>> sharding.prepare(model)
        >>> parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    """
    if isinstance(model, StowedTensor):
        model._prepared = ""
    elif isinstance(model, nn.Module):
        for name, parameter in model.named_parameters():
            if isinstance(parameter, StowedTensor):
                parameter._prepared = name
    else:
        raise InvalidArgument(
            "sharding.prepare: must get a module or a resting weight, got " + type(model).__name__
        )
    return model

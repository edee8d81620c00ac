# SPDX-License-Identifier: Apache-2.0
"""Weights that are spread over processes, brought together in each: for files of flat bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from stowage._model.weights import Held, written
from stowage._ops import _torch
from stowage._ops.errors import FileError
from stowage._shard.describing import is_spread, local_of

T = TypeVar("T")


def reshard(model: nn.Module) -> None:
    """Lets FSDP2's modules hold their own rows again, as they do between two steps."""
    for module in model.modules():
        if _torch.fsdp_state(module) is not None:
            sharded: Any = module
            sharded.reshard()


def together(model: nn.Module) -> list[Held]:
    """What a file holds of `model`, no tensor spread any more, weights of fp8 training as their
    plain values. All processes must call it, and in each of them the whole model rests then."""
    reshard(model)
    held = written(model)
    with torch.no_grad():
        return [replace(h, tensor=full(h.tensor)) for h in held]


def full(tensor: torch.Tensor) -> torch.Tensor:
    spread: Any = tensor
    return local_of(spread.full_tensor() if is_spread(tensor) else tensor)


def by_the_first(spread: bool, write: Callable[[], T]) -> T | None:
    """What `write` gives in process 0, alone; where it fails, it fails in all of them."""
    if not spread:
        return write()
    import torch.distributed as dist

    result, error = None, None
    if dist.get_rank() == 0:
        try:
            result = write()
        except Exception as failed:
            error = failed
    told = [None if error is None else f"{error}"]
    dist.broadcast_object_list(told, src=0)
    if error is not None:
        raise error
    if told[0] is not None:
        raise FileError(f"stowage: process 0 must write the files, and failed: {told[0]}")
    return result

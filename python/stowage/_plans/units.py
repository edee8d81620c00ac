# SPDX-License-Identifier: Apache-2.0
"""The weights of a model as the planner of the core takes them: names, storages, shapes, bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stowage._files.names import DISK_NAMES, FLOAT8
from stowage._model.sizes import nbytes
from stowage._model.weights import LAZY, Held, written
from stowage._ops.errors import InvalidArgument
from stowage._tensor.stowed import StowedTensor

_PLAIN = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", **FLOAT8}


def units_of(model: nn.Module) -> list[dict[str, Any]]:
    """One unit for each parameter and persistent buffer, ties once, in the model's order. No value
    is read: the model may be on the meta device. Raises InvalidArgument for lazy modules."""
    every = written(model)
    lazy = [held.name for held in every if isinstance(held.tensor, LAZY)]
    if lazy:
        raise InvalidArgument(
            f"stowage.plan: every parameter must have a shape, {lazy[0]} has none until its module "
            "has run"
        )
    return [_unit(held) for held in every]


def _unit(held: Held) -> dict[str, Any]:
    tensor = held.tensor
    return {
        "name": held.name,
        "storage": _storage(tensor),
        "shape": list(tensor.shape),
        "rest": nbytes(tensor),
        "rows": not held.is_buffer and held.gives_rows,
    }


def _storage(tensor: torch.Tensor) -> str:
    if isinstance(tensor, StowedTensor):
        return str(tensor.storage)
    return _PLAIN.get(tensor.dtype) or DISK_NAMES.get(tensor.dtype, str(tensor.dtype))

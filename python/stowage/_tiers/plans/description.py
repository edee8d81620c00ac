# SPDX-License-Identifier: Apache-2.0
"""What the core is told of a model that it plans: its weights as they rest, and its config."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from stowage._files.names import DISK_NAMES, FLOAT8
from stowage._model.files.save import in_rows
from stowage._model.sizes import nbytes
from stowage._model.weights import LAZY, Held, tensors_of_index
from stowage._ops import _torch
from stowage._ops.errors import InvalidArgument
from stowage._shard.local_shards import first_row, is_spread
from stowage._shard.own_matrices import gathered, left_in_file
from stowage._shard.rows import RESTING

Source = nn.Module | str | os.PathLike[str]
_PAGES = 2 * 4096  # bytes at the ends of a tensor in a file
_PLAIN = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", **FLOAT8}


def described(source: Source) -> dict[str, Any]:
    if isinstance(source, nn.Module):
        return {"path": None, "name": type(source).__name__, "units": units_of(source)}
    if not isinstance(source, str | os.PathLike):
        raise InvalidArgument(f"stowage.plan: must be given a model or a path, got {source!r}")
    path = os.fspath(source)
    return {"path": path, "name": path, "units": []}


def config_of(source: Source) -> str:
    """The text of a model's config, in the words of transformers; "" where it has none. Of a path
    it is read beside the file."""
    written = getattr(getattr(source, "config", None), "to_json_string", None)
    return str(written()) if isinstance(source, nn.Module) and callable(written) else ""


def units_of(model: nn.Module) -> list[dict[str, Any]]:
    """One unit for each parameter and persistent buffer, ties once, in the model's order. No value
    is read: the model may be on the meta device. Raises InvalidArgument for lazy modules."""
    every = in_rows(model).written
    lazy = [held.name for held in every if isinstance(held.tensor, LAZY)]
    if lazy:
        raise InvalidArgument(
            f"stowage.plan: every parameter must have a shape, {lazy[0]} has none until its module "
            "has run"
        )
    taken = gathered(model)
    return [_unit(held, taken) for held in every if not is_spread(held.tensor) or _is_here(held)]


def _is_here(held: Held) -> bool:
    """Whether something of it is."""
    return bool(_torch.local_of(held.tensor).numel())


def _unit(held: Held, taken: frozenset[int]) -> dict[str, Any]:
    """Of what is spread over processes what is here. `taken`: the ids of what FSDP2 gathers."""
    tensor = _torch.local_of(held.tensor)
    stays = is_spread(held.tensor) and not left_in_file(held.tensor, taken)
    return {
        "name": held.name,
        "storage": _storage(tensor),
        "shape": list(tensor.shape),
        "rest": nbytes(tensor),
        "rests": isinstance(tensor, RESTING),
        "rows": not held.is_buffer and held.gives_rows,
        "stack": held.is_stack and not stays,
        "stays": stays,
        "index_scratch": 0 if stays else _scratch(held, tensor),
        "first": first_row(held.tensor),
        "total": held.tensor.shape[0] if held.is_stack else 0,
    }


def _scratch(held: Held, tensor: torch.Tensor) -> int:
    """Bytes that an index of a stack comes through, in whole pages wherever its tensors begin."""
    tensors = tensors_of_index(held)
    return nbytes(tensor) // len(tensor) + tensors * _PAGES if tensors else 0


def _storage(tensor: torch.Tensor) -> str:
    if isinstance(tensor, RESTING):
        return tensor.resting
    return _PLAIN.get(tensor.dtype) or DISK_NAMES.get(tensor.dtype, str(tensor.dtype))

# SPDX-License-Identifier: Apache-2.0
"""What a process holds of a parameter that is spread over many, in words and bytes: for reports."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stowage._ops import _torch
from stowage._shard.groups import shard_dim
from stowage._shard.rows import StowedRows
from stowage._tensor.stowed import StowedTensor


class Piece(NamedTuple):
    """Of one parameter."""

    local: Tensor  # what is here
    rows: str  # "whole", or which rows are here, such as "rows 4-6 of 7"
    wire: str | None  # what a gather carries: a storage or a dtype; None where nothing travels
    whole_bytes: int | None  # at rest in all processes, each row once; None: as many as here


def is_spread(tensor: Tensor) -> bool:
    """Whether it is a DTensor. Asked without importing them, which takes a second."""
    return hasattr(tensor, "placements") and hasattr(tensor, "full_tensor")


def first_row(tensor: Tensor) -> int:
    """Which index of dim 0 the first row is that this process has."""
    if not is_spread(tensor) or not tensor.dim():
        return 0
    spread: Any = tensor
    _, offsets = _torch.compute_local_shape_and_global_offset(
        spread.shape, spread.device_mesh, spread.placements
    )
    return int(offsets[0])


def holds_matrices(spread: Any) -> bool:
    """Whether a DTensor has, as a weight of their own, some indices of dim 0 of a stack that rests,
    each with bytes of its own."""
    local = _torch.local_of(spread)
    if local is spread or not isinstance(local, StowedTensor) or local.dim() < 3:
        return False
    dims = {shard_dim(place) for place in spread.placements}
    same = local.shape[1:] == spread.shape[1:]
    return same and dims <= {0, None} and local._storage.gives_indices(spread.shape)


def values_of(tensor: Tensor) -> Tensor:
    """What files hold of it here: of a DTensor the local tensor, of fp8 training plain values."""
    local: Any = _torch.local_of(tensor)
    return getattr(local, "plain_value", local)


def wire_dtypes(model: nn.Module) -> dict[int, torch.dtype]:
    """In which dtype FSDP2 gathers a parameter that rests in another, by its id."""
    return {
        id(held.sharded_param): held.mp_policy.param_dtype
        for module in model.modules()
        for group in _torch.fsdp_groups(_torch.fsdp_state(module))
        for held in group.fsdp_params
        if held.mp_policy.param_dtype is not None
    }


def piece_of(tensor: Tensor, dtypes: dict[int, torch.dtype]) -> Piece:
    """`dtypes` are those of `wire_dtypes`."""
    local = values_of(tensor)
    if not is_spread(tensor):
        return Piece(local, "whole", None, None)
    spread: Any = tensor
    inner = _torch.local_tensor(spread)
    text = _rows_text(spread)
    if text == "whole":
        return Piece(local, text, None, None)
    if isinstance(inner, StowedRows):
        geometry = inner._whole.geometry
        shared = sum(part.nbytes for part in inner._shared())
        pieces = inner._whole.uncut[1] // inner._whole.shape[1] if inner._whole.total else 1
        whole = pieces * geometry.rows * geometry.length + shared
        return Piece(local, text, inner.resting, whole)
    dtype = dtypes.get(id(tensor), local.dtype)
    wire = getattr(inner, "travels", str(dtype).removeprefix("torch."))
    if holds_matrices(spread):  # of which DTensor would send values
        layout = inner._storage.layout(spread.shape)
        return Piece(local, text, wire, sum(math.prod(s) * d.itemsize for _, d, s in layout))
    return Piece(local, text, wire, math.prod(tensor.shape) * local.dtype.itemsize)


def _rows_text(spread: Any) -> str:
    dims = {d for place in spread.placements if (d := shard_dim(place)) is not None}
    if not dims:
        return "whole"
    sizes, offsets = _torch.compute_local_shape_and_global_offset(
        spread.shape, spread.device_mesh, spread.placements
    )
    texts = []
    for dim in sorted(dims):
        name, total = ("rows" if dim == 0 else f"dim {dim}:"), spread.shape[dim]
        here = f"{offsets[dim]}-{offsets[dim] + sizes[dim] - 1}" if sizes[dim] else "none"
        texts.append(f"{name} {here} of {total}")
    return ", ".join(texts)

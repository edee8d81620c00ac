# SPDX-License-Identifier: Apache-2.0
"""One weight at a time: checks what a storage asks of it, and makes the frozen parameter that
rests, from values or from parts. The peak beyond inputs and result is a block of rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from stowage._model.weights import LAZY
from stowage._ops import library
from stowage._ops.errors import InvalidArgument, StowageError, translated
from stowage._ops.storage import Storage
from stowage._tensor.stowed import VALUE_DTYPES, StowedTensor


@dataclass(frozen=True)
class Making:
    """How weights are made: the options that `stow` and `load` share."""

    compute_dtype: torch.dtype | None = None
    exact: bool = False
    keep_nonfinite: bool = False
    measure: bool = True

    def __post_init__(self) -> None:
        if self.compute_dtype is not None and self.compute_dtype not in VALUE_DTYPES:
            raise InvalidArgument(
                f"stowage: compute_dtype must be one of {_names(VALUE_DTYPES)}, or None, got "
                f"{self.compute_dtype}"
            )


@dataclass(frozen=True)
class Loss:
    """How far a resting weight is from the values it was made from."""

    max_error: float
    rms_error: float
    relative_error: float
    saturated: int
    nonfinite: int
    worst_block_error: float  # the largest relative error of values that share a scale ...
    worst_block: int | None  # ... and the place of that scale in its part; None: all values are 0


Loss.__module__ = "stowage._model.stowing"  # pickles name it


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def obstacle(name: str, storage: Storage, shape: Sequence[int]) -> str:
    """Why `storage` cannot hold a weight of this shape; "" if it can."""
    try:
        library.storage_on_disk(name, storage.key, list(shape))
    except RuntimeError as error:
        told = translated(error)
        if not isinstance(told, StowageError):
            raise
        return str(told)
    return ""


def unfit(name: str, tensor: torch.Tensor, storage: Storage) -> str:
    """Why the values of `tensor` cannot be quantized to `storage`; "" if they can."""
    if isinstance(tensor, LAZY):
        return "must have a shape: run the model once, its lazy layers are not initialised"
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        return f"must be an ordinary tensor, got {type(tensor).__name__}"
    if tensor.is_meta:
        return "must hold values, got a meta tensor (stowage.load fills a model built on meta)"
    if tensor.layout is not torch.strided:
        return f"must be a dense tensor, got {tensor.layout}"
    if tensor.dtype not in VALUE_DTYPES:
        return f"values must be {_names(VALUE_DTYPES)}, got {_names([tensor.dtype])}"
    return obstacle(name, storage.for_values(tensor.dtype), tensor.shape)


def from_values(
    values: torch.Tensor, storage: Storage, how: Making, compute: torch.dtype
) -> tuple[nn.Parameter, Loss | None]:
    """Raises InvalidArgument for NaN or infinite values unless they are kept."""
    values = values.detach().contiguous()
    storage = storage.for_values(values.dtype)
    try:
        parts = library.quantize(values, storage.key, how.keep_nonfinite)
        loss = measured(values, parts, storage) if how.measure else None
    except RuntimeError as error:
        raise translated(error) from None
    return from_parts(parts, storage, values.shape, compute, how.exact), loss


def from_indices(
    indices: Iterable[torch.Tensor],
    shape: Sequence[int],
    storage: Storage,
    how: Making,
    compute: torch.dtype,
) -> tuple[nn.Parameter, Loss | None]:
    """The same of values that come by indices of dim 0, for a storage whose indices `stand_alone`:
    those of one are held at a time."""
    layout = storage.layout(tuple(shape))
    parts = [torch.empty(sizes, dtype=dtype, device="cpu") for _, dtype, sizes in layout]
    figures: list[float] | None = None
    try:
        for i, values in enumerate(indices):
            one = library.quantize(values[None], storage.key, how.keep_nonfinite)
            if how.measure:
                found = _figures(values[None], one, storage)
                if storage.kind != "none" and found[7] >= 0:
                    found[7] += i * one[1].numel() // (storage.record or 1)
                figures = found if figures is None else _together(figures, found)
            for part, own in zip(parts, one, strict=True):
                part.view(shape[0], -1)[i] = own.view(-1)
    except RuntimeError as error:
        raise translated(error) from None
    if figures is not None and storage.kind == "none" and figures[5]:  # one block is all
        figures[6:] = [math.sqrt(figures[4] / figures[5]), 0.0]
    loss = None if figures is None else _loss(figures)
    return from_parts(parts, storage, shape, compute, how.exact), loss


def measured(values: torch.Tensor, parts: list[torch.Tensor], storage: Storage) -> Loss:
    return _loss(_figures(values, parts, storage))


def _figures(values: torch.Tensor, parts: list[torch.Tensor], storage: Storage) -> list[float]:
    found: list[float] = library.measure(values, parts[0], parts[1:], storage.key).tolist()
    return found


def _together(one: list[float], two: list[float]) -> list[float]:
    """Figures of two weights as of one; the worst block is the first of those that are as bad."""
    sums = [a + b for a, b in zip(one, two, strict=True)]
    sums[3] = max(one[3], two[3])
    return sums[:6] + (two[6:] if two[6] > one[6] else one[6:])


def _loss(found: list[float]) -> Loss:
    elements, saturated, nonfinite, largest, error2, value2, worst, block = found
    finite = elements - nonfinite
    return Loss(
        max_error=largest,
        rms_error=math.sqrt(error2 / finite) if finite else 0.0,
        relative_error=math.sqrt(error2 / value2) if value2 else 0.0,
        saturated=int(saturated),
        nonfinite=int(nonfinite),
        worst_block_error=worst,
        worst_block=int(block) if block >= 0 else None,
    )


def from_parts(
    parts: Sequence[torch.Tensor],
    storage: Storage,
    shape: Sequence[int],
    compute: torch.dtype,
    exact: bool,
) -> nn.Parameter:
    """A frozen parameter over `parts`, in the order of `storage.part_names`; nothing is copied."""
    weight = StowedTensor(parts, storage, tuple(shape), compute, exact=exact)
    return nn.Parameter(weight, requires_grad=False)


def relabelled(weight: StowedTensor, compute: torch.dtype, exact: bool) -> nn.Parameter:
    """The same resting bytes with another compute dtype."""
    parts = list(weight.parts.values())
    made = from_parts(parts, weight._storage, weight.shape, compute, exact)
    cast(StowedTensor, made)._origin = weight._origin
    return made

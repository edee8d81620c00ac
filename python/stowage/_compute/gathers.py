# SPDX-License-Identifier: Apache-2.0
"""Indices of dim 0 taken by an integer tensor: only the rows that it names are dequantized.

So `experts[ids]`, which libraries write for a batch of tokens, reads the experts that are used.
"""

from typing import Any

import torch
from torch import Tensor

from stowage._ops import library
from stowage._ops.lending import lender_of
from stowage.registry import op
from stowage.tensor import VALUE_DTYPES, StowedTensor
from stowage.views import is_first

aten = torch.ops.aten
_INTEGERS = (torch.int64, torch.int32)


def _takes_rows(t: Any, index: Any) -> bool:
    if type(t) is not StowedTensor or not t.dim() or t._dt not in VALUE_DTYPES:
        return False
    if not isinstance(index, Tensor) or index.dtype not in _INTEGERS:
        return False
    if index.device == t.device:
        return True
    return type(index) is Tensor and lender_of(t._parts()[0], index.device) is not None


def _within(index: Tensor, rows: int, first: int) -> bool:
    """Out of range, stock torch has the text of the error."""
    if index.is_meta or type(index) is not Tensor or not index.numel():
        return True
    low, high = index.aminmax()
    return first <= int(low) and int(high) < rows


def _rows(t: StowedTensor, index: Tensor) -> Tensor:
    codes, *scales = t._parts()
    return library.embedding(index, codes, scales, t._storage.key, t.shape, t._dt)


@op(aten.index.Tensor)
def _index(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    t, (index, *others) = args
    if others or not _takes_rows(t, index) or not _within(index, t.shape[0], -t.shape[0]):
        return NotImplemented
    return _rows(t, torch.where(index < 0, index + t.shape[0], index))


@op(aten.index_select.default)
def _index_select(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    t, dim, index = args
    if not _takes_rows(t, index) or not is_first(dim, t.dim()) or index.dim() > 1:
        return NotImplemented
    if not _within(index, t.shape[0], 0):
        return NotImplemented
    return _rows(t, index.view(-1))

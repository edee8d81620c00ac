# SPDX-License-Identifier: Apache-2.0
"""A batch multiplied by one matrix that is expanded over it: one product of all its rows.

So torch multiplies rows that do not follow each other in memory, as those of an RNN whose batch
comes first.
"""

from typing import Any

import torch
from torch import Tensor

from stowage._compute import products
from stowage.registry import op
from stowage.tensor import StowedTensor
from stowage.views import PACKED, StowedView

aten = torch.ops.aten


def _expanded(t: Any) -> tuple[StowedTensor, bool] | None:
    """The stowed matrix that `t` is a batch of, and whether of its transpose; else None."""
    if type(t) is not StowedView or t._weight._matrix is None or t.stride(0):
        return None
    w = t._weight
    rows, columns = w.shape
    if t.storage_offset() != w.storage_offset():
        return None
    for transposed, shape, stride in (
        (False, (rows, columns), (columns, 1)),
        (True, (columns, rows), (1, columns)),
    ):
        if t.shape[1:] == shape and t.stride()[1:] == stride:
            return w, transposed
    return None


@op(aten.bmm.default)
def _bmm(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    left, right = args
    if (found := _expanded(right)) is None or isinstance(left, PACKED):
        return NotImplemented
    w, transposed = found
    assert w._matrix is not None
    codes, scales, key, rows, exact, dtype, _ = w._matrix
    # Exact products are those of torch's kernel for batches; shapes that misfit have its error.
    if exact or left.dtype is not dtype or left.dim() != 3 or left.shape[0] != right.shape[0]:
        return NotImplemented
    if left.shape[2] != right.shape[1]:
        return NotImplemented
    x: Tensor = left.contiguous()
    if transposed:
        return products.linear(x, codes, scales, key, rows, None, exact)
    return products.linear_grad_input(x, codes, scales, key, w.shape[1], exact)

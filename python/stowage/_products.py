# SPDX-License-Identifier: Apache-2.0
"""The product ops, for callers that the dispatcher sees; in a block on the weight that it widened.

That is the product which the op itself would ask torch for, so a block changes no bit.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from stowage import ops
from stowage._blocks import widened

_stock_linear = torch._C._nn.linear


def linear_in_block(
    x: Tensor, codes: Tensor, scales: Sequence[Tensor], storage: int, rows: int, bias: Tensor | None
) -> Tensor | None:
    """x W^T + bias inside a block, else None."""
    w = widened(codes, scales, storage, (rows, x.shape[-1]), x.dtype)
    return None if w is None else _stock_linear(x, w, bias)


def grad_input_in_block(
    g: Tensor, codes: Tensor, scales: Sequence[Tensor], storage: int, columns: int
) -> Tensor | None:
    """g W inside a block, else None."""
    w = widened(codes, scales, storage, (g.shape[-1], columns), g.dtype)
    return None if w is None else g.reshape(-1, g.shape[-1]).mm(w).view(*g.shape[:-1], columns)


def linear(
    x: Tensor,
    codes: Tensor,
    scales: Sequence[Tensor],
    storage: int,
    rows: int,
    bias: Tensor | None,
    exact: bool,
) -> Tensor:
    """x W^T + bias."""
    y = linear_in_block(x, codes, scales, storage, rows, bias) if exact else None
    return ops.linear(x, codes, scales, storage, rows, bias, exact) if y is None else y


def linear_grad_input(
    g: Tensor, codes: Tensor, scales: Sequence[Tensor], storage: int, columns: int, exact: bool
) -> Tensor:
    """g W."""
    gx = grad_input_in_block(g, codes, scales, storage, columns) if exact else None
    return ops.linear_grad_input(g, codes, scales, storage, columns, exact) if gx is None else gx

# SPDX-License-Identifier: Apache-2.0
"""The product ops, for callers that the dispatcher sees; in a block on the weight that it widened.

That is the product which the op itself would ask torch for, so a block changes no bit. Exact ones
follow torch in what strides do, too.
"""

from collections.abc import Sequence

from torch import Tensor

from stowage._compute.blocks import widened
from stowage._ops import _torch, library

_stock_linear = _torch.linear


def strides_count(x: Tensor) -> bool:
    """Whether torch's product with x, or its gradient, may take another way than with a contiguous
    one, and other roundings with it. Only exact weights care."""
    return not x.is_contiguous()


def linear_in_block(
    x: Tensor, codes: Tensor, scales: Sequence[Tensor], storage: int, rows: int, bias: Tensor | None
) -> Tensor | None:
    """x W^T + bias inside a block, else None."""
    if codes.device != x.device:
        return None
    w = widened(codes, scales, storage, (rows, x.shape[-1]), x.dtype)
    return None if w is None else _stock_linear(x, w, bias)


def grad_input_in_block(
    g: Tensor, codes: Tensor, scales: Sequence[Tensor], storage: int, columns: int
) -> Tensor | None:
    """g W inside a block, or where its strides choose torch's kernel (see `strides_count`), else
    None."""
    if codes.device != g.device:
        return None
    shape = (g.shape[-1], columns)
    w = widened(codes, scales, storage, shape, g.dtype)
    if w is None and g.dim() == 2 and strides_count(g):
        w = library.dequantize(codes, scales, storage, shape, g.dtype)
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
    return library.linear(x, codes, scales, storage, rows, bias, exact) if y is None else y


def linear_grad_input(
    g: Tensor, codes: Tensor, scales: Sequence[Tensor], storage: int, columns: int, exact: bool
) -> Tensor:
    """g W."""
    gx = grad_input_in_block(g, codes, scales, storage, columns) if exact else None
    return (
        library.linear_grad_input(g, codes, scales, storage, columns, exact) if gx is None else gx
    )

# SPDX-License-Identifier: Apache-2.0
"""What torch needs to know of ops that are called as torch.ops.stowage.*: gradients and vmap.

`stowage.autograd` does the same for the package's own calls, at a third of the cost.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stowage._ops import library
from stowage._tensor import autograd


def _save(ctx: Any, codes: Tensor, scales: Sequence[Tensor]) -> None:
    ctx.save_for_backward(codes, *scales)


def _as_given(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
    """One for each argument of the call, in which a default may have been left out."""
    return gradients[: len(ctx.needs_input_grad)]


def _linear_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, codes, scales, ctx.storage, _, ctx.bias, ctx.exact = inputs
    ctx.columns, ctx.bias = x.shape[-1], ctx.bias is not None
    _save(ctx, codes, scales)


def _linear_backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    codes, *scales = ctx.saved_tensors
    gx = gb = None
    if ctx.needs_input_grad[0]:
        gx = library.linear_grad_input(g, codes, scales, ctx.storage, ctx.columns, ctx.exact)
    if ctx.bias and ctx.needs_input_grad[5]:
        gb = autograd.bias_gradient(g)
    return _as_given(ctx, gx, None, [None] * len(scales), None, None, gb, None)


def _grad_input_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    g, codes, scales, ctx.storage, _, ctx.exact = inputs
    ctx.rows = g.shape[-1]
    _save(ctx, codes, scales)


def _grad_input_backward(ctx: Any, gg: Tensor) -> tuple[Any, ...]:
    codes, *scales = ctx.saved_tensors
    g = library.linear(gg, codes, scales, ctx.storage, ctx.rows, None, ctx.exact)
    return _as_given(ctx, g, None, [None] * len(scales), None, None, None)


torch.library.register_autograd("stowage::linear", _linear_backward, setup_context=_linear_setup)
torch.library.register_autograd(
    "stowage::linear_grad_input", _grad_input_backward, setup_context=_grad_input_setup
)


def _only_first(op: str, dims: tuple[Any, ...]) -> None:
    def batched(dim: Any) -> bool:
        return any(d is not None for d in dim) if isinstance(dim, list | tuple) else dim is not None

    if any(batched(d) for d in dims):
        raise NotImplementedError(f"stowage::{op}: vmap over a stowed weight is not supported")


@torch.library.register_vmap("stowage::linear")
def _linear_vmap(
    info: Any,
    dims: tuple[Any, ...],
    x: Tensor,
    codes: Tensor,
    scales: Sequence[Tensor],
    storage: int,
    rows: int,
    bias: Tensor | None,
    exact: bool = False,
) -> tuple[Tensor, int]:
    _only_first("linear", dims[1:5])
    x = x.expand(info.batch_size, *x.shape) if dims[0] is None else x.movedim(dims[0], 0)
    if dims[5] is None or bias is None:
        return library.linear(x, codes, scales, storage, rows, bias, exact), 0
    bias = bias.movedim(dims[5], 0)
    bias = bias.view(len(bias), *([1] * (x.dim() - 2)), rows)
    return library.linear(x, codes, scales, storage, rows, None, exact) + bias, 0


@torch.library.register_vmap("stowage::linear_grad_input")
def _grad_input_vmap(
    info: Any,
    dims: tuple[Any, ...],
    g: Tensor,
    codes: Tensor,
    scales: Sequence[Tensor],
    storage: int,
    columns: int,
    exact: bool = False,
) -> tuple[Tensor, int]:
    _only_first("linear_grad_input", dims[1:])
    g = g.movedim(dims[0], 0)
    return library.linear_grad_input(g, codes, scales, storage, columns, exact), 0


@torch.library.register_vmap("stowage::embedding")
def _embedding_vmap(
    info: Any,
    dims: tuple[Any, ...],
    ids: Tensor,
    codes: Tensor,
    scales: Sequence[Tensor],
    storage: int,
    shape: Sequence[int],
    out: torch.dtype,
    tile: bool = False,
) -> tuple[Tensor, int]:
    _only_first("embedding", dims[1:])
    return library.embedding(ids.movedim(dims[0], 0), codes, scales, storage, shape, out, tile), 0

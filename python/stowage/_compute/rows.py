# SPDX-License-Identifier: Apache-2.0
"""Gradient of embedding: a dense one, to the weight, as torch's own; ids have none."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stowage._ops import _torch, library
from stowage._ops.library import composite_forced

# Arguments of the Functions: weight, ids, codes, storage, shape, padding, by_frequency, *scales.


def _save_embedding(ctx: Any, inputs: tuple[Any, ...]) -> None:
    weight, ids, _, _, shape, ctx.padding, ctx.by_frequency, *scales = inputs
    ctx.device, ctx.rows, ctx.inputs = weight.device, shape[0], 7 + len(scales)
    ctx.save_for_backward(ids)


def _embedding_backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    (ids,) = ctx.saved_tensors
    g, ids = g.to(ctx.device), ids.to(ctx.device)  # the gradient is where the weight is
    wide = g.float() if composite_forced() and g.dtype == torch.bfloat16 else g
    padding = -1 if ctx.padding is None else ctx.padding
    gw = torch.ops.aten.embedding_dense_backward(wide, ids, ctx.rows, padding, ctx.by_frequency)
    return gw.to(g.dtype), *([None] * (ctx.inputs - 1))


def _embedding_forward(
    weight: Tensor,
    ids: Tensor,
    codes: Tensor,
    storage: int,
    shape: Sequence[int],
    padding: int | None,
    by_frequency: bool,
    *scales: Tensor,
) -> Tensor:
    return library.embedding(ids, codes, scales, storage, shape, weight.dtype)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        _save_embedding(ctx, inputs)
        return _embedding_forward(*inputs)

    backward = staticmethod(_embedding_backward)


class _EmbeddingTransformed(torch.autograd.Function):
    generate_vmap_rule = True
    forward = staticmethod(_embedding_forward)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _save_embedding(ctx, inputs)

    backward = staticmethod(_embedding_backward)


def embedding(
    ids: Tensor,
    codes: Tensor,
    scales: Sequence[Tensor],
    storage: int,
    shape: Sequence[int],
    out: torch.dtype,
    weight: Tensor | None = None,
    padding: int | None = None,
    by_frequency: bool = False,
) -> Tensor:
    """Rows of W with a gradient to `weight` (give it only where it requires one)."""
    if weight is None or not (torch.is_grad_enabled() or _torch.transforming()):
        return library.embedding(ids, codes, scales, storage, shape, out)
    function = _EmbeddingTransformed if _torch.transforming() else _Embedding
    given = (weight, ids, codes, storage, shape, padding, by_frequency)
    return function.apply(*given, *scales)

# SPDX-License-Identifier: Apache-2.0
"""Gradients of the ops. Only codes and scales are saved, never a dequantized weight; the input is
saved too where the weight itself wants a gradient, which is a plain tensor of the compute dtype.

The hot path uses Functions of the old style (33 us cheaper a call); torch.func and forward-mode
need the style with setup_context; direct callers of torch.ops are served by register_autograd.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from stowage import ops
from stowage._library import composite_forced

_WIDEN = torch.bfloat16 if composite_forced() else None  # no bf16 arithmetic in stock ops
_functorch_active = torch._C._are_functorch_transforms_active


def _transforming() -> bool:
    """Under torch.func, or inside forward_ad.dual_level()."""
    return _functorch_active() or forward_ad._current_level >= 0


def weight_gradient(g: Tensor, x: Tensor) -> Tensor:
    """g^T x over all leading dimensions."""
    wide, seen = g.reshape(-1, g.shape[-1]), x.reshape(-1, x.shape[-1])
    if g.dtype is _WIDEN:
        return wide.float().t().mm(seen.float()).to(g.dtype)
    return wide.t().mm(seen)


def bias_gradient(g: Tensor) -> Tensor:
    wide = g.reshape(-1, g.shape[-1])
    return wide.float().sum(0).to(g.dtype) if g.dtype is _WIDEN else wide.sum(0)


# --- linear: x, bias, weight, codes, storage, rows, exact, *scales ------------------------------
# `weight` is the tensor that receives the gradient, or None; its values are never read.


def _save_linear(ctx: Any, inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
    x, _, weight, codes, ctx.storage, _, ctx.exact, *scales = inputs
    ctx.columns, ctx.scales = x.shape[-1], len(scales)
    saved = (codes, *scales) if weight is None else (codes, *scales, x, weight)
    ctx.save_for_backward(*saved)
    return saved


def _linear_backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    codes, *rest = ctx.saved_tensors
    scales, kept = rest[: ctx.scales], rest[ctx.scales :]
    x, weight = kept or (None, None)
    need_x, need_bias, need_weight = ctx.needs_input_grad[:3]
    gx = gb = gw = None
    if need_x:
        gx = linear_grad_input(g, codes, scales, ctx.storage, ctx.columns, weight, ctx.exact)
    if need_bias:
        gb = bias_gradient(g)
    if need_weight and x is not None:
        gw = weight_gradient(g, x)
    return gx, gb, gw, None, None, None, None, *([None] * ctx.scales)


def _linear_forward(
    x: Tensor,
    bias: Tensor | None,
    _: Tensor | None,
    codes: Tensor,
    storage: int,
    rows: int,
    exact: bool,
    *scales: Tensor,
) -> Tensor:
    return ops.linear(x, codes, scales, storage, rows, bias, exact)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        _save_linear(ctx, inputs)
        return _linear_forward(*inputs)

    backward = staticmethod(_linear_backward)


class _LinearTransformed(torch.autograd.Function):
    generate_vmap_rule = True
    forward = staticmethod(_linear_forward)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        saved = _save_linear(ctx, inputs)
        ctx.save_for_forward(*saved)
        ctx.rows = inputs[5]

    backward = staticmethod(_linear_backward)

    @staticmethod
    def jvp(ctx: Any, tx: Tensor | None, tb: Tensor | None, tw: Tensor | None, *_: Any) -> Any:
        codes, *rest = ctx.saved_tensors
        scales, kept = rest[: ctx.scales], rest[ctx.scales :]
        terms = []
        if tx is not None:
            terms.append(linear(tx, codes, scales, ctx.storage, ctx.rows, None, None, ctx.exact))
        if tw is not None:
            terms.append(torch.nn.functional.linear(kept[0], tw))
        if tb is not None:
            terms.append(tb)
        return sum(terms[1:], terms[0])


def linear(
    x: Tensor,
    codes: Tensor,
    scales: Sequence[Tensor],
    storage: int,
    rows: int,
    bias: Tensor | None = None,
    weight: Tensor | None = None,
    exact: bool = False,
) -> Tensor:
    """x W^T + bias with gradients to x, bias and `weight` (give it only where it requires one)."""
    if _transforming():
        return _LinearTransformed.apply(x, bias, weight, codes, storage, rows, exact, *scales)
    if torch.is_grad_enabled() and (
        x.requires_grad or weight is not None or (bias is not None and bias.requires_grad)
    ):
        return _Linear.apply(x, bias, weight, codes, storage, rows, exact, *scales)
    return ops.linear(x, codes, scales, storage, rows, bias, exact)


# --- linear_grad_input: g, weight, codes, storage, columns, exact, *scales ----------------------


def _save_grad_input(ctx: Any, inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
    g, weight, codes, ctx.storage, _, ctx.exact, *scales = inputs
    ctx.rows, ctx.scales = g.shape[-1], len(scales)
    saved = (codes, *scales) if weight is None else (codes, *scales, g, weight)
    ctx.save_for_backward(*saved)
    return saved


def _grad_input_backward(ctx: Any, gg: Tensor) -> tuple[Any, ...]:
    codes, *rest = ctx.saved_tensors
    scales, kept = rest[: ctx.scales], rest[ctx.scales :]
    g, weight = kept or (None, None)
    need_g, need_weight = ctx.needs_input_grad[:2]
    out = gw = None
    if need_g:
        out = linear(gg, codes, scales, ctx.storage, ctx.rows, None, weight, ctx.exact)
    if need_weight and g is not None:
        gw = weight_gradient(g, gg)
    return out, gw, None, None, None, None, *([None] * ctx.scales)


def _grad_input_forward(
    g: Tensor,
    _: Tensor | None,
    codes: Tensor,
    storage: int,
    columns: int,
    exact: bool,
    *scales: Tensor,
) -> Tensor:
    return ops.linear_grad_input(g, codes, scales, storage, columns, exact)


class _LinearGradInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        _save_grad_input(ctx, inputs)
        return _grad_input_forward(*inputs)

    backward = staticmethod(_grad_input_backward)


class _LinearGradInputTransformed(torch.autograd.Function):
    generate_vmap_rule = True
    forward = staticmethod(_grad_input_forward)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        saved = _save_grad_input(ctx, inputs)
        ctx.save_for_forward(*saved)
        ctx.columns = inputs[4]

    backward = staticmethod(_grad_input_backward)

    @staticmethod
    def jvp(ctx: Any, tg: Tensor | None, tw: Tensor | None, *_: Any) -> Any:
        codes, *rest = ctx.saved_tensors
        scales, kept = rest[: ctx.scales], rest[ctx.scales :]
        terms = []
        if tg is not None:
            where = (codes, scales, ctx.storage, ctx.columns, None, ctx.exact)
            terms.append(linear_grad_input(tg, *where))
        if tw is not None:
            terms.append(torch.matmul(kept[0], tw))
        return sum(terms[1:], terms[0])


def linear_grad_input(
    g: Tensor,
    codes: Tensor,
    scales: Sequence[Tensor],
    storage: int,
    columns: int,
    weight: Tensor | None = None,
    exact: bool = False,
) -> Tensor:
    """g W, itself differentiable."""
    if _transforming():
        return _LinearGradInputTransformed.apply(g, weight, codes, storage, columns, exact, *scales)
    if torch.is_grad_enabled() and (g.requires_grad or weight is not None):
        return _LinearGradInput.apply(g, weight, codes, storage, columns, exact, *scales)
    return ops.linear_grad_input(g, codes, scales, storage, columns, exact)


# --- embedding: weight, ids, codes, storage, shape, padding, by_frequency, *scales ---------------


def _save_embedding(ctx: Any, inputs: tuple[Any, ...]) -> None:
    _, ids, _, _, shape, ctx.padding, ctx.by_frequency, *scales = inputs
    ctx.rows, ctx.inputs = shape[0], 7 + len(scales)
    ctx.save_for_backward(ids)


def _embedding_backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    (ids,) = ctx.saved_tensors
    wide = g.float() if g.dtype is _WIDEN else g
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
    return ops.embedding(ids, codes, scales, storage, shape, weight.dtype)


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
    if weight is None or not (torch.is_grad_enabled() or _transforming()):
        return ops.embedding(ids, codes, scales, storage, shape, out)
    function = _EmbeddingTransformed if _transforming() else _Embedding
    given = (weight, ids, codes, storage, shape, padding, by_frequency)
    return function.apply(*given, *scales)

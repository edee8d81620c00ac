# SPDX-License-Identifier: Apache-2.0
"""Gradients of the ops. Only codes and scales are saved, never a dequantized weight; the input is
saved too where the weight itself wants a gradient, which is a plain tensor of the compute dtype.

The hot path uses Functions of the old style (33 us cheaper a call); torch.func and forward-mode
need the style with setup_context; direct callers of torch.ops are served by register_autograd.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stowage._ops import _torch
from stowage._ops.library import composite_forced
from stowage._tensor.products import linear as direct
from stowage._tensor.products import linear as products
from stowage._tensor.products.embedding import embedding

__all__ = ["embedding", "linear", "linear_grad_input"]

_compiling = torch.compiler.is_compiling
_grad_enabled = torch.is_grad_enabled
# Codes that a backward kept stay wrapped when the transform around its forward has ended (vjp).
_wrapped = _torch.is_functorch_wrapped_tensor
_VIEWS = _torch.DispatchKeySet(_torch.DispatchKey.ADInplaceOrView)
_WIDEN = torch.bfloat16 if composite_forced() else None  # no bf16 arithmetic in stock ops


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
    x, _, weight, codes, storage, _, exact, *scales = inputs
    ctx.facts = storage, x.shape[-1], exact, len(scales)
    saved = (codes, *scales) if weight is None else (codes, *scales, x, weight)
    ctx.save_for_backward(*saved)
    return saved


def _linear_backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    storage, columns, exact, count = ctx.facts
    codes, *rest = ctx.saved_tensors
    scales, kept = rest[:count], rest[count:]
    x, weight = kept or (None, None)
    need_x, need_bias, need_weight = ctx.needs_input_grad[:3]
    gx = gb = gw = None
    if need_x:
        gx = linear_grad_input(g, codes, scales, storage, columns, weight, exact)
    if need_bias:
        gb = bias_gradient(g)
    if need_weight and x is not None and weight is not None:
        gw = weight_gradient(g, x).to(weight.device)  # its codes may have been fetched to x
    return gx, gb, gw, None, None, None, None, *([None] * count)


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
    return products.linear(x, codes, scales, storage, rows, bias, exact)


def _not_a_view(product: Callable[..., Tensor], *args: Any) -> Tensor:
    """torch's own product of exact=True may be a view of a matrix. A Function's result must not be:
    it could not be written to in place, as in relu_(layer(x))."""
    if _compiling():
        return product(*args)
    with _torch.ExcludeDispatchKeyGuard(_VIEWS):
        return product(*args)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        _save_linear(ctx, inputs)
        return _not_a_view(_linear_forward, *inputs)

    backward = staticmethod(_linear_backward)


class _LinearDirect(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        weight: Tensor | None,
        codes: Tensor,
        storage: int,
        rows: int,
        exact: bool,
        *scales: Tensor,
    ) -> Tensor:
        ctx.facts = storage, x.size(-1), exact, len(scales)
        kept = (x, weight) if ctx.needs_input_grad[2] else ()
        ctx.save_for_backward(codes, *scales, *kept)
        if exact:
            given = (x, codes, scales, storage, rows, bias, exact)
            return _not_a_view(direct.linear_direct, *given)
        return direct.linear_direct(x, codes, scales, storage, rows, bias, exact)

    backward = staticmethod(_linear_backward)


# Function.apply without its look for transforms, 3 us less: there is none, unseen() found.
_apply_direct = super(torch.autograd.Function, _LinearDirect).apply


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
        storage, _, exact, count = ctx.facts
        codes, *rest = ctx.saved_tensors
        scales, kept = rest[:count], rest[count:]
        terms = []
        if tx is not None:
            terms.append(linear(tx, codes, scales, storage, ctx.rows, None, None, exact))
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
    if _torch.unseen(x) and not _wrapped(codes):
        return linear_unseen(x, codes, scales, storage, rows, bias, weight, exact)
    if _torch.transforming():
        return _LinearTransformed.apply(x, bias, weight, codes, storage, rows, exact, *scales)
    if _grad_enabled() and (
        x.requires_grad or weight is not None or (bias is not None and bias.requires_grad)
    ):
        return _Linear.apply(x, bias, weight, codes, storage, rows, exact, *scales)
    return products.linear(x, codes, scales, storage, rows, bias, exact)


def linear_unseen(
    x: Tensor,
    codes: Tensor,
    scales: Sequence[Tensor],
    storage: int,
    rows: int,
    bias: Tensor | None,
    weight: Tensor | None,
    exact: bool,
) -> Tensor:
    """linear, for x that is _torch.unseen(); here `weight` may be one that needs no gradient."""
    if _grad_enabled() and (
        x.requires_grad
        or (bias is not None and bias.requires_grad)
        or (weight is not None and weight.requires_grad)
    ):
        return _apply_direct(x, bias, weight, codes, storage, rows, exact, *scales)
    return direct.linear_direct(x, codes, scales, storage, rows, bias, exact)


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
    if need_weight and g is not None and weight is not None:
        gw = weight_gradient(g, gg).to(weight.device)
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
    return products.linear_grad_input(g, codes, scales, storage, columns, exact)


class _LinearGradInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        _save_grad_input(ctx, inputs)
        return _not_a_view(_grad_input_forward, *inputs)

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
    if _torch.transforming():
        return _LinearGradInputTransformed.apply(g, weight, codes, storage, columns, exact, *scales)
    if torch.is_grad_enabled() and (g.requires_grad or weight is not None):
        return _LinearGradInput.apply(g, weight, codes, storage, columns, exact, *scales)
    if _torch.unseen(g) and not _wrapped(codes):
        return direct.linear_grad_input_direct(g, codes, scales, storage, columns, exact)
    return products.linear_grad_input(g, codes, scales, storage, columns, exact)

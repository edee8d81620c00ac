# SPDX-License-Identifier: Apache-2.0
"""F.linear with a float8 weight: which operands are cast, forward and backward."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stowage._ops.errors import InvalidArgument
from stowage.training import delayed_scales, history
from stowage.training.cuts import WHOLE, Cut, over_ranks
from stowage.training.recipes import Recipe, amax_of, scale_of
from stowage.training.scaled_product import Cast, cast, high, product


def linear(input: Tensor, weight: Any, bias: Tensor | None = None, *, cut: Cut = WHOLE) -> Tensor:
    """x W^T + bias; the bias is added in high precision. Autocast's dtype is that of the result.

    `cut`: what of x, W and the result this rank has, where tensor parallelism has cut them."""
    device = input.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        input = input.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    elif input.dtype != weight.dtype:
        raise InvalidArgument(
            f"stowage: the input of {weight._layer.name} must have the weight's dtype "
            f"{weight.dtype}, got {input.dtype}"
        )
    if input.shape[-1] != weight.shape[1]:
        raise InvalidArgument(
            f"stowage: the input of {weight._layer.name} must have {weight.shape[1]} columns, got "
            f"{list(input.shape)}"
        )
    rows: Tensor = _Linear.apply(input.reshape(-1, input.shape[-1]), weight, cut)
    # no view: FSDP2 hangs a hook on the result, which a write in place to a view would lose
    result: Tensor = torch.ops.aten._unsafe_view(rows, [*input.shape[:-1], weight.shape[0]])
    return result if bias is None else result + bias


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, cut: Cut) -> Tensor:
        recipe: Recipe = weight._layer.recipe
        ctx.cut = cut
        ctx.scale = weight.fresh_scale()
        w = weight.cast(ctx.scale, after=x)
        ctx.save_for_backward(x, weight)
        ctx.x_scale = None
        if recipe.products == "high":
            return high(x, w.values(x.dtype).t())
        amax = over_ranks(_amax(x, recipe), cut, cut.columns)
        ctx.x_scale = _scale(weight, history.INPUT, amax, x.dtype)
        return product(cast(x, ctx.x_scale, recipe.forward), w.t(), x.dtype, fast=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        cut: Cut = ctx.cut
        w = weight.cast(ctx.scale, after=g)
        recipe: Recipe = weight._layer.recipe
        g_cast = None
        if not recipe.rows and recipe.products == "fp8":
            amax = over_ranks(_amax(g, recipe), cut, cut.rows)
            scale = _scale(weight, history.GRADIENT, amax, g.dtype)
            g_cast = cast(g, scale, recipe.backward)
        grad_x = _grad_input(g, g_cast, w, recipe, cut) if ctx.needs_input_grad[0] else None
        grad_w = None
        if ctx.needs_input_grad[1]:
            grad_w = _grad_weight(g, g_cast, x, ctx.x_scale, recipe).to(weight.dtype)
        return grad_x, grad_w, None


def _grad_input(g: Tensor, g_cast: Cast | None, w: Cast, recipe: Recipe, cut: Cut) -> Tensor:
    """g W."""
    if recipe.products == "high":
        return high(g, w.values(g.dtype))
    if g_cast is not None:
        return product(g_cast, w, g.dtype)
    values = w.values(torch.float32)
    whole = recipe.grad_weight == "high"  # one scale for W, not one for each of its columns
    amax = over_ranks(amax_of(values, None if whole else 0), cut, cut.rows or whole)
    w = _cast_with(amax, values, recipe, recipe.forward)
    amax = over_ranks(amax_of(g, 1), cut, cut.rows)
    return product(_cast_with(amax, g, recipe, recipe.backward), w, g.dtype)


def _grad_weight(
    g: Tensor, g_cast: Cast | None, x: Tensor, x_scale: Tensor | None, recipe: Recipe
) -> Tensor:
    """g^T x."""
    if recipe.grad_weight == "high":
        return high(g.t(), x)
    if g_cast is not None and x_scale is not None:
        return product(g_cast.t(), cast(x, x_scale, recipe.forward), x.dtype)
    columns = _dynamic(g, recipe, recipe.backward)
    return product(columns.t(), _dynamic(x, recipe, recipe.forward), x.dtype)


def _dynamic(values: Tensor, recipe: Recipe, target: torch.dtype) -> Cast:
    """With a scale for each column, all of which is here: what is cut are never the rows of x."""
    return _cast_with(amax_of(values, 0), values, recipe, target)


def _cast_with(amax: Tensor, values: Tensor, recipe: Recipe, target: torch.dtype) -> Cast:
    facts = {"pow2": recipe.pow2, "source": values.dtype}
    return cast(values, scale_of(amax, target, recipe.scale_mode, **facts), target)  # type: ignore[arg-type]


def _amax(values: Tensor, recipe: Recipe) -> Tensor:
    return amax_of(values, 1 if recipe.rows else None)


def _scale(weight: Any, role: int, amax: Tensor, source: torch.dtype) -> Tensor:
    """Of an input or a gradient: over its rows, of this step, or of earlier ones."""
    recipe: Recipe = weight._layer.recipe
    if recipe.delayed:
        return delayed_scales.scale(weight._layer, weight._number, role, amax)
    target = recipe.backward if role == history.GRADIENT else recipe.forward
    facts = {"pow2": recipe.pow2, "source": source}
    return scale_of(amax, target, recipe.scale_mode, **facts)  # type: ignore[arg-type]

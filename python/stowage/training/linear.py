# SPDX-License-Identifier: Apache-2.0
"""F.linear with a float8 weight: which operands are cast, forward and backward."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stowage._errors import InvalidArgument
from stowage.training import delayed, history
from stowage.training.products import Cast, cast, high, product
from stowage.training.recipes import Recipe
from stowage.training.scales import amax_of, scale_of


def linear(input: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias; the bias is added in high precision. Autocast's dtype is that of the result."""
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
    rows: Tensor = _Linear.apply(input.reshape(-1, input.shape[-1]), weight)
    # no view: FSDP2 hangs a hook on the result, which a write in place to a view would lose
    result: Tensor = torch.ops.aten._unsafe_view(rows, [*input.shape[:-1], weight.shape[0]])
    return result if bias is None else result + bias


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any) -> Tensor:
        recipe: Recipe = weight._layer.recipe
        ctx.scale = weight.fresh_scale()
        w = weight.cast(ctx.scale, after=x)
        ctx.save_for_backward(x, weight)
        ctx.x_scale = None
        if recipe.products == "high":
            return high(x, w.values(x.dtype).t())
        ctx.x_scale = _scale(weight, history.INPUT, x, recipe.forward)
        return product(cast(x, ctx.x_scale, recipe.forward), w.t(), x.dtype, fast=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        w = weight.cast(ctx.scale, after=g)
        recipe: Recipe = weight._layer.recipe
        g_cast = None
        if not recipe.rows and recipe.products == "fp8":
            scale = _scale(weight, history.GRADIENT, g, recipe.backward)
            g_cast = cast(g, scale, recipe.backward)
        grad_x = _grad_input(g, g_cast, w, recipe) if ctx.needs_input_grad[0] else None
        grad_w = None
        if ctx.needs_input_grad[1]:
            grad_w = _grad_weight(g, g_cast, x, ctx.x_scale, recipe).to(weight.dtype)
        return grad_x, grad_w


def _grad_input(g: Tensor, g_cast: Cast | None, w: Cast, recipe: Recipe) -> Tensor:
    """g W."""
    if recipe.products == "high":
        return high(g, w.values(g.dtype))
    if g_cast is not None:
        return product(g_cast, w, g.dtype)
    values = w.values(torch.float32)
    dim = None if recipe.grad_weight == "high" else 0
    return product(_rows(g, recipe), _dynamic(values, dim, recipe, recipe.forward), g.dtype)


def _grad_weight(
    g: Tensor, g_cast: Cast | None, x: Tensor, x_scale: Tensor | None, recipe: Recipe
) -> Tensor:
    """g^T x."""
    if recipe.grad_weight == "high":
        return high(g.t(), x)
    if g_cast is not None and x_scale is not None:
        return product(g_cast.t(), cast(x, x_scale, recipe.forward), x.dtype)
    columns = _dynamic(g, 0, recipe, recipe.backward)
    return product(columns.t(), _dynamic(x, 0, recipe, recipe.forward), x.dtype)


def _rows(g: Tensor, recipe: Recipe) -> Cast:
    return _dynamic(g, 1, recipe, recipe.backward)


def _dynamic(values: Tensor, dim: int | None, recipe: Recipe, target: torch.dtype) -> Cast:
    amax = amax_of(values, dim)
    facts = {"pow2": recipe.pow2, "source": values.dtype}
    return cast(values, scale_of(amax, target, recipe.scale_mode, **facts), target)  # type: ignore[arg-type]


def _scale(weight: Any, role: int, values: Tensor, target: torch.dtype) -> Tensor:
    """Of an input or a gradient: over its rows, of this step, or of earlier ones."""
    recipe: Recipe = weight._layer.recipe
    amax = amax_of(values, 1 if recipe.rows else None)
    if recipe.delayed:
        return delayed.scale(weight._layer, weight._number, role, amax)
    facts = {"pow2": recipe.pow2, "source": values.dtype}
    return scale_of(amax, target, recipe.scale_mode, **facts)  # type: ignore[arg-type]

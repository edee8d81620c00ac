# SPDX-License-Identifier: Apache-2.0
"""Embedding, EmbeddingBag and Bilinear with resting weights: the rows that ids name are widened, or
a tile of rows at a time. Below autograd, as operators.py, so that graphs keep codes and scales. The
gradient of an embedding goes to the weight, dense as torch's own; ids have none."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stowage._ops import _torch, library
from stowage._ops.library import composite_forced
from stowage._tensor.products import blocks
from stowage._tensor.products.linear import with_autocast
from stowage._tensor.products.tiles import needs_tiles, resting, spans
from stowage._tensor.stowed import VALUE_DTYPES, StowedTensor
from stowage._tensor.tables import op
from stowage._tensor.views import PACKED

aten = torch.ops.aten
_MAX = 2  # the mode of embedding_bag that has largest elements


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


def _among(ids: Tensor, padding: int) -> tuple[Tensor, Tensor, int]:
    """The ids that occur, each id's place among them, and the padding's place."""
    asked = ids if padding < 0 else torch.cat([ids.new_tensor([padding]), ids])
    if type(ids) is Tensor:
        names, places = torch.unique(asked, return_inverse=True)
    else:  # traced: how many differ is not known
        names, places = asked, torch.arange(asked.shape[0], device=asked.device)
    places = places.to(ids.dtype)
    if padding < 0:
        return names, places, padding
    here = int(places[0]) if type(ids) is Tensor else 0
    return names, torch.where(ids == padding, here, places[1:]), here


def _rows(w: StowedTensor, names: Tensor) -> Tensor:
    codes, *scales = w._parts()
    return library.embedding(names, codes, scales, w._storage.key, w.shape, w._dt)


@op(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def _embedding_bag(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    w, ids, offsets, *rest = args
    if type(w) is not StowedTensor or w._dt not in VALUE_DTYPES or kwargs:
        return NotImplemented
    rest += [False, 0, False, None, False, -1][len(rest) :]
    names, places, rest[5] = _among(ids, rest[5])
    out, bag_of, sizes, largest = called(_rows(w, names), places, offsets, *rest)
    if rest[1] == _MAX and names.shape[0]:  # which row each element came from
        largest = names.index_select(0, largest.reshape(-1)).view_as(largest).to(largest.dtype)
    return out, bag_of, sizes, largest


@op(aten._embedding_bag_per_sample_weights_backward.default)
def _per_sample_weights(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    g, w, ids, offsets, bag_of, mode, *padding = args
    if type(w) is not StowedTensor or w._dt not in VALUE_DTYPES or kwargs:
        return NotImplemented
    names, places, here = _among(ids, *(padding or [-1]))
    return called(g, _rows(w, names), places, offsets, bag_of, mode, here)


@op(aten._trilinear.default)
def _trilinear(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What bilinear and its gradients are made of: products in [batch, rows, columns 1, columns 2],
    to which each argument lacks the dimensions that it is expanded in."""
    a, w, b, without_a, without_w, without_b, summed = args[:7]
    if (
        type(w) is not StowedTensor
        or not needs_tiles(w)
        or list(without_w) != [0]
        or _not_plain(args, kwargs)
    ):
        return with_autocast(called, blocks.values(args), blocks.values(kwargs))
    made, total = [], None
    held = resting(w)
    for first, last in spans(w.shape[0], held.row_bytes):
        left, right = _of_rows(a, without_a, first, last), _of_rows(b, without_b, first, last)
        part = with_autocast(called, (left, held.rows(first, last), right, *args[3:7]), {})
        if 1 not in summed:
            made.append(part)
        else:
            total = part.to(_wider(part.dtype)) if total is None else total.add_(part)
    return torch.cat(made, 1) if total is None else total.to(part.dtype)


def _wider(dtype: torch.dtype) -> torch.dtype:
    """What sums of tiles are kept in."""
    return torch.promote_types(dtype, torch.float32)


def _not_plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(
        len(args) > 7 or kwargs or isinstance(args[0], PACKED) or isinstance(args[2], PACKED)
    )


def _of_rows(t: Tensor, without: Sequence[int], first: int, last: int) -> Tensor:
    """What an argument has for some rows of the weight, if it has them."""
    return t if 1 in without else t.narrow(0 if 0 in without else 1, first, last - first)

# SPDX-License-Identifier: Apache-2.0
"""EmbeddingBag and Bilinear with resting weights: the rows that the ids name are widened, or a tile
of rows at a time. Below autograd, as dispatch.py, so that graphs keep codes and scales."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stowage._compute import blocks
from stowage._compute.autocast import with_autocast
from stowage._compute.tiles import needs_tiles, resting, spans
from stowage._ops import library
from stowage.registry import op
from stowage.tensor import VALUE_DTYPES, StowedTensor
from stowage.views import PACKED

aten = torch.ops.aten
_MAX = 2  # the mode of embedding_bag that has largest elements


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

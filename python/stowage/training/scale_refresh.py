# SPDX-License-Identifier: Apache-2.0
"""All scales of a model in one reduction.

Each rank fills one fp32 vector: for each weight its amax (0 where the rank has no rows), who found
a value that is not finite, and what the weight is; for delayed layers, the amax values seen; and
where rows have scales of their own and lie in pieces, the amax of every row of the weight. The
largest over the ranks that the weights are spread over, in all dimensions of their mesh, answers
everything, the errors too, so that all ranks raise alike and none waits for one that has raised.
"""

import zlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stowage._ops import _torch
from stowage._ops.errors import InvalidArgument
from stowage._shard.groups import groups_of
from stowage.training import history
from stowage.training.layers import Layer, Stamp, Watched, watched
from stowage.training.recipes import amax_of, amaxes, tensor_scale
from stowage.training.trained_weight import TrainedWeight

_ENTRIES = 7  # amax, rank + 1 that is not finite, code, -code, three of the history


def entry_bytes() -> int:
    """What the reduction carries for each weight."""
    return _ENTRIES * torch.float32.itemsize


class _Weight(NamedTuple):
    """What a refresh needs, found before it reads the values: these drive all else from caches."""

    layer: Layer
    sharded: Any  # its DTensor, or None
    value: Tensor
    code: int
    stamp: Stamp
    seen: Watched


def refresh_scales(model: nn.Module) -> None:
    """Updates every scale of the model's float8 weights, by one reduction.

    Call it after the optimizer's step, on every rank; where it is forgotten, the next use of a
    weight that has changed does it.

    Args:
        model: a module that was converted.

    Raises:
        InvalidArgument: on every rank the same, where a weight is not finite or the ranks do not
            hold the same layers.

    Example:
        >>> stowage.training.convert_float8(model)
        >>> stowage.training.refresh_scales(model)
    """
    found: dict[int, Layer] = {}
    for module in model.modules():
        weight: Any = _torch.parameters(module).get("weight")
        layer = getattr(_torch.local_of(weight), "_layer", None)
        if isinstance(layer, Layer):
            found[id(layer)] = layer
    refresh(list(found.values()))


@torch.no_grad()
def refresh(layers: list[Layer]) -> None:
    """The same for `layers`, those of one model in its order."""
    for groups, weights in _in_groups(layers).items():
        rows = [_row_amax(weight) for weight in weights if weight.layer.cuts_rows]
        vector = _entries(weights, bool(groups))
        vector, *rows = _largest([vector, *rows], groups)
        _check(vector, weights, bool(groups))
        _set(vector, rows, weights)


def _in_groups(layers: list[Layer]) -> dict[tuple[Any, ...], list[_Weight]]:
    """The weights whose scales this rank must find, by the groups that they are spread over."""
    found: dict[tuple[Any, ...], list[_Weight]] = {}
    known: dict[Any, tuple[Any, ...]] = {}
    with _torch.DisableTorchFunctionSubclass():  # plain facts, of thousands of wrappers
        for layer in layers:
            resting, sharded = layer.resting(TrainedWeight)
            if resting is None:
                continue
            if layer.recipe.rows and sharded is not None and not layer.parallel:
                continue  # they travel with the rows, and all that see them see the same
            key = None if sharded is None else (id(sharded.device_mesh), sharded.placements)
            groups = known.get(key)
            if groups is None:
                groups = known[key] = () if sharded is None else groups_of(sharded)
            found.setdefault(groups, []).append(_weight(layer, resting, sharded))
    return found


def _weight(layer: Layer, resting: TrainedWeight, sharded: Any) -> _Weight:
    if sharded is None:
        whole, seen = resting, watched(resting)
    else:
        whole, seen = sharded, watched(resting, sharded)
    value = resting._value
    code = _code(layer, value.dtype, whole.shape[1])
    return _Weight(layer, sharded, value, code, resting._stamp, seen)


def _largest(tensors: list[Tensor], groups: tuple[Any, ...]) -> list[Tensor]:
    """As one vector."""
    if not groups:
        return tensors
    one = len(tensors) == 1
    joined = tensors[0] if one else torch.cat([tensor.view(-1) for tensor in tensors])
    for group in groups:
        dist.all_reduce(joined, dist.ReduceOp.MAX, group=group)
    if one:
        return [joined]
    pieces = joined.split([tensor.numel() for tensor in tensors])
    return [piece.view_as(tensor) for piece, tensor in zip(pieces, tensors, strict=True)]


def _row_amax(weight: _Weight) -> Tensor:
    """fp32, one for each row of the whole weight: 0 for those that are not here."""
    value, first = weight.value, _first_row(weight)
    found = value.new_zeros(weight.sharded.shape[0], dtype=torch.float32)
    here = amax_of(value, 1).view(-1)
    found[first : first + len(here)] = torch.where(here.isfinite(), here, torch.zeros_like(here))
    return found


def _first_row(weight: _Weight) -> int:

    whole = weight.sharded
    _, offsets = _torch.compute_local_shape_and_global_offset(
        whole.shape, whole.device_mesh, whole.placements
    )
    return int(offsets[0])


def _code(layer: Layer, dtype: torch.dtype, columns: int) -> int:
    """24 bits of what all ranks must agree on, which fp32 holds exactly."""
    facts = dtype, columns
    if layer.code is None or layer.code[0] != facts:
        text = f"{layer.name} {layer.recipe} {facts}"
        layer.code = facts, zlib.crc32(text.encode()) & 0xFFFFFF
    return layer.code[1]


def _entries(weights: list[_Weight], spread: bool) -> Tensor:
    """fp32 [weights, entries]. A few operators for all of them, since there are thousands."""
    amax = amaxes([weight.value for weight in weights])
    finite = torch.isfinite(amax)
    rank = float(dist.get_rank() + 1 if spread else 1)
    codes = amax.new_tensor([weight.code for weight in weights])
    vector = amax.new_full((len(weights), _ENTRIES), -1)
    vector[:, 0] = torch.where(finite, amax, torch.zeros_like(amax))
    vector[:, 1] = torch.where(finite, torch.zeros_like(amax), torch.full_like(amax, rank))
    vector[:, 2], vector[:, 3] = codes, -codes
    if delayed := [at for at, weight in enumerate(weights) if weight.layer.recipe.delayed]:
        vector[delayed, 4:] = history.seen([weights[at].layer.module for at in delayed])
    return vector


def _check(vector: Tensor, weights: list[_Weight], spread: bool) -> None:
    lines = []
    for weight, entries in zip(weights, vector[:, 1:4].tolist(), strict=True):
        rank, code, minus = entries
        name = weight.layer.name
        if code != -minus:
            lines.append(f"{name} must be the same layer on every rank, got different ones")
        elif rank:
            where = f" on rank {int(rank) - 1}" if spread else ""
            lines.append(f"weight {name} must be finite, got inf or NaN{where}")
    if lines:
        raise InvalidArgument("stowage: " + "; ".join(lines))


def _set(vector: Tensor, rows: list[Tensor], weights: list[_Weight]) -> None:
    """The scales of weights of one recipe, an object that those converted together share, are found
    together."""
    recipes: dict[int, list[int]] = {}
    for at, weight in enumerate(weights):
        recipes.setdefault(id(weight.layer.recipe), []).append(at)
    for places in recipes.values():
        recipe, amax = weights[places[0]].layer.recipe, vector[places, 0]
        scales = tensor_scale(amax, recipe)
        if recipe.delayed:
            modules = [weights[at].layer.module for at in places]
            earlier = history.roll(modules, vector[places, 4:], recipe)[:, history.WEIGHT]
            scales = torch.where(earlier > 0, earlier, scales)
            for at, largest in zip(places, amax.unbind(), strict=True):
                weights[at].layer.amax = largest
        for at, scale in zip(places, scales.unbind(), strict=True):
            weights[at].stamp.set_scale(scale, weights[at].seen)
    for amax, weight in zip(rows, (w for w in weights if w.layer.cuts_rows), strict=True):
        weight.layer.row_scales = tensor_scale(amax, weight.layer.recipe)[:, None]
        first = _first_row(weight)
        scale = weight.layer.row_scales[first : first + weight.value.shape[0]]
        weight.stamp.set_scale(scale, weight.seen)

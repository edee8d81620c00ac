# SPDX-License-Identifier: Apache-2.0
"""All scales of a model in one reduction.

Each rank fills one fp32 vector: for each weight its amax (0 where the rank has no rows), who found
a value that is not finite, and what the weight is; for delayed layers, the amax values seen. The
largest over the ranks of the shard mesh answers everything, the errors too, so that all ranks raise
alike and none waits for one that has raised.
"""

import zlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stowage._errors import InvalidArgument
from stowage.training import history
from stowage.training.layers import Layer
from stowage.training.recipes import Recipe, tensor_scale
from stowage.training.scales import amaxes
from stowage.training.weights import TrainedWeight

_ENTRIES = 7  # amax, rank + 1 that is not finite, code, -code, three of the history


def entry_bytes() -> int:
    """What the reduction carries for each weight."""
    return _ENTRIES * torch.float32.itemsize


class _Weight(NamedTuple):
    layer: Layer
    resting: TrainedWeight


def refresh_scales(model: nn.Module) -> None:
    """Brings every scale of the model's float8 weights up to date, by one reduction.

    Call it after the optimizer's step, on every rank; where it is forgotten, the next use of a
    weight that has changed does it. Raises InvalidArgument, on every rank the same, where a weight
    is not finite or the ranks do not hold the same layers.
    """
    found: dict[int, Layer] = {}
    for module in model.modules():
        weight: Any = module._parameters.get("weight")
        layer = getattr(getattr(weight, "_local_tensor", weight), "_layer", None)
        if isinstance(layer, Layer):
            found[id(layer)] = layer
    refresh(list(found.values()))


@torch.no_grad()
def refresh(layers: list[Layer]) -> None:
    """The same for `layers`, those of one model in its order."""
    meshes: dict[tuple[Any, ...], list[_Weight]] = {}
    known: dict[Any, tuple[Any, ...]] = {}
    for layer in layers:
        resting, sharded = layer.resting(TrainedWeight)
        if resting is None or (layer.recipe.rows and sharded is not None):
            continue
        key = None if sharded is None else (id(sharded.device_mesh), sharded.placements)
        if key not in known:
            known[key] = _groups(sharded)
        meshes.setdefault(known[key], []).append(_Weight(layer, resting))
    for groups, weights in meshes.items():
        vector = _largest(_entries(weights, bool(groups)), groups)
        _check(vector, weights, bool(groups))
        _set(vector, weights)


def _groups(sharded: Any) -> tuple[Any, ...]:
    if sharded is None:
        return ()
    mesh = sharded.device_mesh
    dims = [i for i, place in enumerate(sharded.placements) if place.is_shard()]
    return tuple(mesh.get_group(dim) for dim in dims if mesh.size(dim) > 1)


def _largest(vector: Tensor, groups: tuple[Any, ...]) -> Tensor:
    for group in groups:
        dist.all_reduce(vector, dist.ReduceOp.MAX, group=group)
    return vector


def _code(layer: Layer, value: Tensor) -> int:
    """24 bits of what all ranks must agree on, which fp32 holds exactly."""
    facts = value.dtype, value.shape[1]
    if layer.code is None or layer.code[0] != facts:
        text = f"{layer.name} {layer.recipe} {facts}"
        layer.code = facts, zlib.crc32(text.encode()) & 0xFFFFFF
    return layer.code[1]


def _entries(weights: list[_Weight], spread: bool) -> Tensor:
    """fp32 [weights, entries]. A few operators for all of them, since there are thousands."""
    amax = amaxes([resting._value for _, resting in weights])
    finite = torch.isfinite(amax)
    rank = float(dist.get_rank() + 1 if spread else 1)
    codes = amax.new_tensor(
        [_code(layer, resting._value) for layer, resting in weights], dtype=torch.float32
    )
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


def _set(vector: Tensor, weights: list[_Weight]) -> None:
    """The scales of weights of one recipe are found together."""
    recipes: dict[Recipe, list[int]] = {}
    for at, (layer, _) in enumerate(weights):
        recipes.setdefault(layer.recipe, []).append(at)
    for recipe, places in recipes.items():
        amax = vector[places, 0]
        scales = tensor_scale(amax, recipe)
        if recipe.delayed:
            modules = [weights[at].layer.module for at in places]
            earlier = history.roll(modules, vector[places, 4:], recipe)[:, history.WEIGHT]
            scales = torch.where(earlier > 0, earlier, scales)
        for at, scale, largest in zip(places, scales.unbind(), amax.unbind(), strict=True):
            layer, resting = weights[at]
            layer.amax = largest if recipe.delayed else None
            _, sharded = layer.resting(TrainedWeight)
            watched = (resting,) if sharded is None else (resting, sharded)
            resting._stamp.set_scale(scale, *watched)

# SPDX-License-Identifier: Apache-2.0
"""All scales of a model in one reduction.

Each rank fills one fp32 vector: for each weight its amax (0 where the rank has no rows), who found
a value that is not finite, and what the weight is; for delayed layers, the amax values seen. The
largest over the ranks of the shard mesh answers everything, the errors too, so that all ranks raise
alike and none waits for one that has raised.
"""

import zlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stowage._errors import InvalidArgument
from stowage.training import history
from stowage.training.layers import Layer
from stowage.training.recipes import tensor_scale
from stowage.training.scales import amax_of
from stowage.training.weights import TrainedWeight

_ENTRIES = 7  # amax, rank + 1 that is not finite, code, -code, three of the history


def entry_bytes() -> int:
    """What the reduction carries for each weight."""
    return _ENTRIES * torch.float32.itemsize


@dataclass
class _Weight:
    layer: Layer
    resting: TrainedWeight
    groups: tuple[Any, ...]  # of the shard mesh, one for each sharded dimension of it


def refresh_scales(model: nn.Module) -> None:
    """Brings every scale of the model's float8 weights up to date, by one reduction.

    Call it after the optimizer's step, on every rank; where it is forgotten, the next use of a
    weight that has changed does it. Raises InvalidArgument, on every rank the same, where a weight
    is not finite or the ranks do not hold the same layers.
    """
    found: dict[int, Layer] = {}
    for module in model.modules():
        layer = getattr(getattr(module, "weight", None), "_layer", None)
        local = getattr(getattr(module, "weight", None), "_local_tensor", None)
        layer = getattr(local, "_layer", layer)
        if isinstance(layer, Layer):
            found[id(layer)] = layer
    refresh(list(found.values()))


@torch.no_grad()
def refresh(layers: list[Layer]) -> None:
    """The same for `layers`, those of one model in its order."""
    meshes: dict[tuple[Any, ...], list[_Weight]] = {}
    for layer in layers:
        resting, sharded = layer.resting(TrainedWeight)
        if resting is None or (layer.recipe.rows and sharded is not None):
            continue
        groups = _groups(sharded)
        meshes.setdefault(groups, []).append(_Weight(layer, resting, groups))
    for groups, weights in meshes.items():
        vector = torch.stack([_entries(weight) for weight in weights])
        vector = _largest(vector, groups)
        _check(vector, weights)
        for weight, entries in zip(weights, vector, strict=True):
            _set(weight, entries)


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


def _code(weight: _Weight) -> int:
    """24 bits of what all ranks must agree on, which fp32 holds exactly."""
    layer, resting = weight.layer, weight.resting
    facts = f"{layer.name} {layer.recipe} {resting.dtype} {tuple(resting.shape[1:])}"
    return zlib.crc32(facts.encode()) & 0xFFFFFF


def _entries(weight: _Weight) -> Tensor:
    amax = amax_of(weight.resting._value)
    finite = torch.isfinite(amax)
    rank = dist.get_rank() + 1 if weight.groups else 1
    code = float(_code(weight))
    head = torch.stack(
        [
            torch.where(finite, amax, torch.zeros_like(amax)),
            torch.where(finite, 0.0, float(rank)).to(amax),
            amax.new_tensor(code),
            amax.new_tensor(-code),
        ]
    )
    if not weight.layer.recipe.delayed:
        return torch.cat([head, head.new_full((3,), -1)])
    return torch.cat([head, history.seen(weight.layer.module).to(head)])


def _check(vector: Tensor, weights: list[_Weight]) -> None:
    lines = []
    for weight, entries in zip(weights, vector[:, 1:4].tolist(), strict=True):
        rank, code, minus = entries
        name = weight.layer.name
        if code != -minus:
            lines.append(f"{name} must be the same layer on every rank, got different ones")
        elif rank:
            where = f" on rank {int(rank) - 1}" if weight.groups else ""
            lines.append(f"weight {name} must be finite, got inf or NaN{where}")
    if lines:
        raise InvalidArgument("stowage: " + "; ".join(lines))


def _set(weight: _Weight, entries: Tensor) -> None:
    layer, amax = weight.layer, entries[0].clone()
    if layer.recipe.delayed:
        history.roll(layer.module, entries[4:], layer.recipe)
        layer.amax = amax
        scale = history.scale_for(layer.module, history.WEIGHT, amax, layer.recipe)
    else:
        scale = tensor_scale(amax, layer.recipe)
    weight.resting._stamp.set_scale(scale)

# SPDX-License-Identifier: Apache-2.0
"""What single ranks do in the tests of whole steps: collectives, averages, ties, optimizers."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from float8_ranks import Net, differences, sharded
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stowage.training import convert_float8, refresh_scales


class Collectives(TorchDispatchMode):
    """Every operator of torch.distributed that this rank calls, with its largest tensor's bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, torch.dtype, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
            widest = max(tensors, key=lambda x: x.nbytes)
            name = func._schema.name.split("::")[1].strip("_")
            self.found.append((name, widest.dtype, widest.nbytes))
        return func(*args, **(kwargs or {}))


def collectives(recipe: str, offload: bool) -> list[list[tuple[str, torch.dtype, int]]]:
    """Of each of three steps of two equal layers, the whole of the second."""
    torch.manual_seed(0)
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
    layers = [nn.Linear(64, 64, bias=False) for _ in range(2)]
    model = convert_float8(nn.Sequential(*layers), recipe)
    for layer in model:
        sharded(layer, **options)
    sharded(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=False)
    steps = []
    for _ in range(3):
        with Collectives() as counted:
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            refresh_scales(model)
        steps.append(counted.found)
    return steps


def averages(dtype: torch.dtype) -> tuple[list[float], torch.dtype]:
    """What gradients become that are 8 (rank + 1) in each rank, of weight and bias; their dtype."""
    policy = MixedPrecisionPolicy(reduce_dtype=dtype)
    model = sharded(
        convert_float8(nn.Sequential(nn.Linear(32, 5)), "gather_only"), mp_policy=policy
    )
    (model(torch.ones(8, 32)).sum() * (dist.get_rank() + 1)).backward()
    grads = [parameter.grad.full_tensor() for parameter in model.parameters()]
    return sorted({x for grad in grads for x in grad.flatten().tolist()}), grads[0].dtype


class Tied(nn.Module):
    """An output projection with the weight of the embedding, and fp8 layers between."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 32)
        self.layers = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 32))
        self.head = nn.Linear(32, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(ids)))


def tied() -> tuple[list[str], bool, list[tuple[str, torch.dtype, int]]]:
    """Three steps beside those of a whole model: what differs, whether the tie and its plain type
    hold, and the gathers of one forward pass."""
    torch.manual_seed(0)
    whole = convert_float8(Tied(), "tensorwise")
    parts = copy.deepcopy(whole)
    fully_shard(parts.layers)
    fully_shard(parts)
    wrong = _steps(whole, parts, lambda: torch.randint(7, (8,)), {"foreach": False})
    holds = parts.head.weight is parts.embedding.weight
    holds &= type(parts.head.weight.to_local()) is Tensor
    parts.reshard()
    with Collectives() as counted, torch.no_grad():
        parts(torch.randint(7, (8,)))
    return wrong, holds, [found for found in counted.found if "gather" in found[0]]


def _steps(whole: nn.Module, parts: nn.Module, batch: Any, kind: dict[str, Any]) -> list[str]:
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2, **kind) for m in (whole, parts)]
    for _ in range(3):
        given = batch()
        for model, optimizer in zip((whole, parts), optimizers, strict=True):
            model(given).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return differences(whole, parts)


def optimizers() -> dict[str, tuple[list[str], list[str]]]:
    """What differs from a whole model after three steps of AdamW: of plain and of fp8 weights."""
    found = {}
    for name, kind in (
        ("loops", {"foreach": False}),
        ("foreach", {"foreach": True}),
        ("fused", {"fused": True}),
    ):
        wrong = []
        for convert in (False, True):
            torch.manual_seed(0)
            whole = convert_float8(Net(), "tensorwise") if convert else Net()
            parts = sharded(copy.deepcopy(whole))
            wrong.append(_steps(whole, parts, lambda: torch.randn(8, 32), kind))
        found[name] = (wrong[0], wrong[1])
    return found


def of_two_meshes() -> list[str]:
    """Shards over one dimension of a 2x2 mesh, the other one left alone: what differs."""
    torch.manual_seed(0)
    whole = convert_float8(Net(), "delayed")
    parts = copy.deepcopy(whole)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("others", "shards"))
    fully_shard(parts, mesh=mesh["shards"])
    with Collectives() as counted:
        wrong = _steps(whole, parts, lambda: torch.randn(8, 32), {"foreach": False})
    return wrong + [str(f) for f in counted.found if f[0] == "allreduce" and f[2] != 4 * 28]

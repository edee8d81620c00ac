# SPDX-License-Identifier: Apache-2.0
"""Options of FSDP2, copies and compilers on models that tensor parallelism has cut."""

import copy
from typing import Any

import torch
from parallel import Mlp, mesh_of, spread
from parallel_rest import rests
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from stowage.training import convert_float8, refresh_scales

RECIPES = ("tensorwise", "rowwise")


def whole_of(kind: str) -> Any:
    torch.manual_seed(0)
    return convert_float8(Mlp(), kind) if kind in RECIPES else rests(kind, (256, 256, 64))


def apart(whole: Any, parts: Any) -> float:
    """The largest relative difference of losses over three steps."""
    torch.manual_seed(3)
    most, models = 0.0, (whole, parts)
    trained = [[p for p in m.parameters() if p.requires_grad] for m in models]
    optimizers = [torch.optim.SGD(parameters, 0.01) for parameters in trained]
    for _ in range(3):
        x, losses = torch.randn(8, whole.up.weight.shape[1]), []
        for model, optimizer in zip(models, optimizers, strict=True):
            loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            refresh_scales(model)
            losses.append(loss.item())
        most = max(most, abs(losses[0] - losses[1]) / losses[0])
    return most


def options(kind: str) -> dict[str, float]:
    """How far each way is from the whole model."""
    mesh, found = mesh_of((2, 2)), {}
    ways: dict[str, dict[str, Any]] = {
        "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        "kept": {"reshard_after_forward": False},
        "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    }
    for name, given in ways.items():
        found[name] = apart(whole_of(kind), spread(whole_of(kind), mesh, True, **given))
    found["copied"] = apart(whole_of(kind), copy.deepcopy(spread(whole_of(kind), mesh, False)))
    again: Any = spread(whole_of(kind), mesh, True)
    plain = again.forward
    again.forward = lambda x: checkpoint(plain, x, use_reentrant=False)
    found["recomputed"] = apart(whole_of(kind), again)
    parts, x = spread(whole_of(kind), mesh, True), torch.randn(4, again.up.weight.shape[1])
    with torch.no_grad():
        parts(x)
    with torch.inference_mode():  # which FSDP2 cannot begin in
        found["inference"] = (parts(x) - whole_of(kind)(x)).abs().max().item()
    for fsdp in (False, True):
        compiled = torch.compile(spread(whole_of(kind), mesh, fsdp), backend="aot_eager")
        differences = compiled(x) - whole_of(kind)(x)
        found[f"compiled {fsdp}"] = differences.abs().max().item()
    return found


def by_hand() -> float:
    """A weight that DTensor.from_local distributes."""
    mesh = mesh_of((2, 2))["tp"]
    torch.manual_seed(0)
    model = convert_float8(nn.Sequential(nn.Linear(8, 8, bias=False)))
    whole, at = copy.deepcopy(model), 4 * mesh.get_local_rank()
    piece = model[0].weight.detach()[at : at + 4].clone()
    model[0].weight = nn.Parameter(DTensor.from_local(piece, mesh, [Shard(0)]))
    x = torch.randn(3, 8)
    return float((model(DTensor.from_local(x, mesh)).full_tensor() - whole(x)).abs().max())


def copies(kind: str) -> float:
    """Eight ranks: copies of shards of pieces. No group that exists has all ranks of a weight."""
    names = ("copies", "dp", "tp")
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
    return apart(whole_of(kind), spread(whole_of(kind), _View(mesh), True))


class _View:
    """A mesh whose "dp" is both dimensions of data parallelism."""

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh

    def __getitem__(self, name: str) -> Any:
        return self.mesh["copies", "dp"] if name == "dp" else self.mesh[name]


def everything() -> dict[str, Any]:
    return {"by hand": by_hand(), **{k: options(k) for k in (*RECIPES, "nf4")}}


def every_copy() -> dict[str, float]:
    return {kind: copies(kind) for kind in (*RECIPES, "nf4")}

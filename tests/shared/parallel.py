# SPDX-License-Identifier: Apache-2.0
"""What single ranks do in the tests of tensor parallelism, alone and with FSDP2."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from float8_ranks import counting, plain
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import stowage
from stowage import sharding
from stowage.training import convert_float8, refresh_scales

SIZES = 64, 48, 32


class Mlp(nn.Module):
    """Columns are cut in `up`, rows in `down`, as torch names them."""

    def __init__(self, sizes: tuple[int, int, int] = SIZES) -> None:
        super().__init__()
        self.up = nn.Linear(sizes[0], sizes[1])
        self.down = nn.Linear(sizes[1], sizes[2])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(x)))
        return y


def mesh_of(shape: tuple[int, int]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))


def spread(
    model: nn.Module, mesh: DeviceMesh, fsdp: bool, plan: Any = None, **options: Any
) -> nn.Module:
    plan = plan or {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(sharding.prepare(model), mesh["tp"], plan)
    if fsdp:
        for layer in (model.up, model.down):
            fully_shard(layer, mesh=mesh["dp"], **options)
        fully_shard(model, mesh=mesh["dp"], **options)
    return model


def pair(
    recipe: str,
    mesh: DeviceMesh,
    fsdp: bool,
    convert: dict[str, Any],
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
) -> tuple[Any, Any]:
    torch.manual_seed(0)
    whole = convert_float8(Mlp(sizes).to(dtype), recipe, **convert)
    return whole, spread(copy.deepcopy(whole), mesh, fsdp)


def worst(a: Any, b: Any) -> float:
    """Largest difference, beside the largest value of `b`."""
    a, b = plain(a).float(), plain(b).float()
    return ((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item()


def _gathered(model: Any) -> list[tuple[Tensor, Tensor]]:
    """Codes and factors that this rank multiplies with, after a gather if there is one."""
    found = []
    for layer in (model.up, model.down):
        if hasattr(layer, "unshard"):
            layer.unshard()
        weight = layer.weight
        local = weight._local_tensor if isinstance(weight, DTensor) else weight
        cast = local.cast()
        found.append((cast.codes.view(torch.uint8).clone(), cast.factor.clone()))
        if hasattr(layer, "reshard"):
            layer.reshard()
    return found


def same_codes(whole: Any, parts: Any, mesh: DeviceMesh) -> list[str]:
    """Which pieces of codes or factors are not those of the whole weight."""
    wrong, at, count = [], mesh["tp"].get_local_rank(), mesh["tp"].size()
    for (codes, factor), (want, scale), name, dim in zip(
        _gathered(parts), _gathered(whole), ("up", "down"), (0, 1), strict=True
    ):
        if not torch.equal(codes, want.chunk(count, dim)[at]):
            wrong.append(f"{name}: codes")
        if scale.dim() and dim == 0:
            scale = scale.chunk(count, 0)[at]
        if not torch.equal(factor, scale):
            wrong.append(f"{name}: factors")
    return wrong


def steps(
    recipe: str,
    shape: tuple[int, int],
    fsdp: bool,
    count: int = 4,
    convert: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    sizes: tuple[int, int, int] = SIZES,
) -> dict[str, Any]:
    """Trains a spread model, beside a whole one of the same weights at each step: differences of
    losses, gradients and the first result of `up`, pieces of codes that are not those of the
    whole, and the reductions of each refresh."""
    mesh = mesh_of(shape)
    whole, parts = pair(recipe, mesh, fsdp, convert or {}, dtype, sizes)
    x = torch.randn(8, sizes[0]).to(dtype)
    facts: dict[str, Any] = {"codes": [], "reductions": [], "losses": 0.0, "gradients": 0.0}
    ups: list[Tensor] = []
    hooks = [m.up.register_forward_hook(lambda *args: ups.append(args[2])) for m in (whole, parts)]
    for model in (whole, parts):
        model(x)
    columns = ups[0].chunk(shape[1], -1)[mesh["tp"].get_local_rank()]
    facts["forward"] = worst(ups[1], columns)
    for hook in hooks:
        hook.remove()
    optimizer = torch.optim.AdamW(parts.parameters(), 1e-2)
    for _ in range(count):
        x, target, losses = torch.randn(8, sizes[0]).to(dtype), torch.randn(8, sizes[2]), []
        for model in (whole, parts):
            loss = (
                model(x).float() * target
            ).sum()  # whose gradient no other order of adding moves
            loss.backward()
            losses.append(loss.item())
        facts["losses"] = max(facts["losses"], abs(losses[0] - losses[1]) / target.norm().item())
        for p, q in zip(whole.parameters(), parts.parameters(), strict=True):
            facts["gradients"] = max(facts["gradients"], worst(q.grad, p.grad))
        optimizer.step()
        for model in (whole, parts):
            model.zero_grad()
        with torch.no_grad():
            for p, q in zip(whole.parameters(), parts.parameters(), strict=True):
                p.copy_(plain(q))
        with counting() as counts:
            refresh_scales(parts)
        facts["reductions"].append(counts.reductions)
        refresh_scales(whole)
        facts["codes"] += same_codes(whole, parts, mesh)
    return facts


def all_steps(cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    return [steps(*case) for case in cases]


def stale(recipe: str) -> tuple[list[int], bool]:
    """Writes to the pieces and uses them without a refresh: reductions of scales, and whether the
    codes are those of the whole weight."""
    mesh = mesh_of((2, 2))
    whole, parts = pair(recipe, mesh, True, {}, torch.float32, SIZES)
    x = torch.randn(4, SIZES[0])
    for model in (whole, parts):
        model(x)
        for parameter in model.parameters():
            parameter.data.mul_(3)
    with counting() as counts:
        parts(x)
    whole(x)
    return counts.reductions, not same_codes(whole, parts, mesh)


def not_finite(recipe: str, fsdp: bool) -> str:
    """The text that a NaN on the last rank gives here, by a refresh or by the first use. Without
    FSDP2 only those of one tensor-parallel group know of each other: one in each."""
    mesh = mesh_of((2, 2))
    _, parts = pair(recipe, mesh, fsdp, {}, torch.float32, SIZES)
    if dist.get_rank() in ((3,) if fsdp else (1, 3)):
        with torch.no_grad():
            parts.down.weight._local_tensor[0, 0] = torch.nan
    return text_of(
        lambda: refresh_scales(parts) if recipe == "tensorwise" else parts(torch.randn(2, SIZES[0]))
    )


def text_of(call: Any) -> str:
    try:
        call()
    except stowage.StowageError as error:
        return str(error)
    raise AssertionError("not refused")


def refusals() -> list[str]:
    """Meshes of two dimensions, weights that modules share, inputs that nobody distributed."""
    mesh = mesh_of((2, 2))
    model = convert_float8(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    weight, both = model[0].weight, [Replicate(), Shard(0)]
    meshes = nn.Parameter(distribute_tensor(weight, mesh, both))
    texts = [text_of(lambda: setattr(model[0], "weight", meshes))]
    model[0].weight = nn.Parameter(distribute_tensor(weight, mesh["tp"], [Shard(0)]))
    texts.append(text_of(lambda: model(torch.randn(2, 8))))
    tied = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    tied[1].weight = tied[0].weight
    convert_float8(tied)
    plan = {"1": ColwiseParallel()}
    texts.append(text_of(lambda: parallelize_module(tied, mesh["tp"], plan)))
    return texts


def saved(folder: str) -> list[str]:
    """Flat files and checkpoints of a model that is spread both ways; what differs."""
    whole, parts = pair("tensorwise", mesh_of((2, 2)), True, {}, torch.float32, SIZES)
    sharding.save(parts, folder)
    wrong = _unlike(whole, stowage.state_dict(parts), "state_dict")
    for shape in ((4, 1), (1, 4), (2, 2)):
        torch.manual_seed(1)
        other = convert_float8(Mlp())
        sharding.load(spread(other, mesh_of(shape), True), folder)
        wrong += _unlike(whole, stowage.state_dict(other), f"{shape}")
    alone = convert_float8(Mlp())
    sharding.load(alone, folder)
    return wrong + _unlike(whole, stowage.state_dict(alone), "one process")


def _unlike(whole: nn.Module, state: dict[str, Tensor], where: str) -> list[str]:
    want = stowage.state_dict(whole)
    assert want.keys() == state.keys(), where
    return [f"{where}: {name}" for name in want if not torch.equal(want[name], state[name])]


def float8(folder: str, cases: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    """All of a test in one start of four processes."""
    return {
        "steps": all_steps(cases),
        "stale": [stale(recipe) for recipe in ("tensorwise", "rowwise")],
        "not finite": [not_finite(*c) for c in (("tensorwise", True), ("rowwise", True))],
        "not finite here": not_finite("rowwise", False),
        "refusals": refusals(),
        "saved": saved(folder),
    }

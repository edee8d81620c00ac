# SPDX-License-Identifier: Apache-2.0
"""What single ranks do in the tests of the life of sharded fp8 models: meshes, files, graphs."""

import copy
import gc
from typing import Any

import torch
import torch.distributed as dist
from float8_ranks import Net, differences, sharded
from torch import Tensor, nn
from torch.distributed import checkpoint as checkpoints
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from stowage import sharding
from stowage.training import check, convert_float8, refresh_scales, reset_history


def refused_int() -> list[str]:
    """What both checks and the first gather say to reshard_after_forward=2."""
    model = convert_float8(Net(), "tensorwise")
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)), reshard_after_forward=2)
    said = []
    for ask in (check, sharding.check, lambda model: model(torch.zeros(1, 32))):
        try:
            ask(model)
        except ValueError as error:
            said.append(str(error))
        else:
            said.append("")
    return said


class InOrder(ReduceScatter):
    """Adds the ranks' gradients in the order of ranks; gloo has an order of its own."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        every = [torch.empty_like(input_tensor) for _ in range(group.size())]
        dist.all_gather(every, input_tensor, group=group)
        first, *others = (given.chunk(group.size())[group.rank()] for given in every)
        for other in others:
            first = first + other
        output_tensor.copy_(first / group.size() if op == dist.ReduceOp.AVG else first)


def own_batches(
    recipe: str, shape: tuple[int, ...], steps: int, in_order: bool = False
) -> tuple[list[float], list[str]]:
    """Every rank has its own data: the relative difference of each loss from that of a whole model
    whose gradients are the ranks' added in rank order, over their number; the weights that are not
    equal. `recipe` "plain": not converted. `in_order`: FSDP2 adds in rank order too."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole = Net() if recipe == "plain" else convert_float8(Net(), recipe)
    parts = copy.deepcopy(whole)
    names = ("pairs", "shards")[-len(shape) :]
    fully_shard(parts, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    if in_order:
        parts.set_custom_reduce_scatter(InOrder())
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2, foreach=False) for m in (whole, parts)]
    errors = []
    for _ in range(steps):
        batches = torch.randn(world, 8, 32)
        mine = parts(batches[rank]).square().mean()
        mine.backward()
        sums: list[Any] = []
        for i, batch in enumerate(batches):
            loss = whole(batch).square().mean()
            loss.backward()
            if i == rank:
                errors.append(abs(loss.item() - mine.item()) / abs(loss.item()))
            grads = [p.grad for p in whole.parameters()]
            sums = [s + g for s, g in zip(sums, grads, strict=True)] if sums else grads
            whole.zero_grad()
        for parameter, total in zip(whole.parameters(), sums, strict=True):
            parameter.grad = total / world
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return errors, differences(whole, parts)


def cycles(count: int) -> tuple[int, int, bool]:
    """Bytes of all tensors that live after the second and after `count` gathers; and whether the
    gathered memory is empty in between."""
    model = sharded(convert_float8(Net(), "rowwise"))

    def living() -> int:
        gc.collect()
        found = {}
        for thing in gc.get_objects():
            if type(thing) is Tensor:
                storage = thing.untyped_storage()
                found[storage._cdata] = storage.nbytes()
        return sum(found.values())

    first = 0
    for i in range(count):
        for layer in model.layers:
            layer.unshard()
            gathered = layer.weight._records
            layer.reshard()
        if i == 1:
            first = living()
    return first, living(), gathered.untyped_storage().nbytes() == 0


def restored(folder: str) -> tuple[list[str], bool, set[str]]:
    """A sharded checkpoint read by another model: what differs; and the types of a full one."""
    batch = torch.ones(1, 32)
    torch.manual_seed(0)
    saved = sharded(convert_float8(Net(), "delayed"))
    saved(batch).sum().backward()
    checkpoints.save({"model": saved.state_dict()}, checkpoint_id=folder)
    torch.manual_seed(5)
    other = sharded(convert_float8(Net(), "delayed"))
    found = {"model": other.state_dict()}
    checkpoints.load(found, checkpoint_id=folder)
    other.load_state_dict(found["model"])
    whole = get_model_state_dict(saved, options=StateDictOptions(full_state_dict=True))
    types = {type(value).__name__ for value in whole.values()}
    return differences(saved, other), torch.equal(saved(batch), other(batch)), types


def from_meta() -> tuple[str, list[str]]:
    """Converted and sharded on the meta device, then given memory and the values of a whole model:
    the type of its shards, and what differs after two steps of both."""
    torch.manual_seed(0)
    whole = convert_float8(Net(), "delayed")
    with torch.device("meta"):
        model = convert_float8(Net(), "delayed")
    sharded(model).to_empty(device="cpu")
    reset_history(model)
    full = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, copy.deepcopy(whole.state_dict()), options=full)
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2, foreach=False) for m in (whole, model)]
    for _ in range(2):
        batch = torch.randn(8, 32)
        for m, optimizer in zip((whole, model), optimizers, strict=True):
            m(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    model.reshard()
    return type(model.layers[0].weight._local_tensor).__name__, differences(whole, model)


def unlike() -> list[str]:
    """Rank 1 converts or makes another layer, in three ways; what this rank is told."""
    return [_unlike(way) for way in ("recipe", "dtype", "shape")]


def _unlike(way: str) -> str:
    other = dist.get_rank() == 1
    recipe = "delayed" if other and way == "recipe" else "tensorwise"
    dtype = torch.bfloat16 if other and way == "dtype" else torch.float32
    columns = 24 if other and way == "shape" else 32
    model = nn.Sequential(nn.Linear(columns, 8, dtype=dtype), nn.Linear(8, 8))
    try:
        refresh_scales(sharded(convert_float8(model, recipe)))
    except ValueError as error:
        return str(error)
    return ""


def compiled(recipe: str, steps: int) -> tuple[list[str], int, int]:
    """Blocks compiled without FSDP2's hooks: what differs from eager ones, graphs and breaks."""
    torch.manual_seed(0)
    eager = convert_float8(Net(), recipe)
    blocks = copy.deepcopy(eager)
    for layer in blocks.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    pair = (sharded(eager), sharded(blocks))
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2, foreach=False) for m in pair]
    counters = torch._dynamo.utils.counters
    counters.clear()
    wrong, graphs = [], 0
    for step in range(steps):
        batch, losses = torch.randn(8, 32), []
        for model, optimizer in zip(pair, optimizers, strict=True):
            loss = model(batch).square().mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        wrong += [] if losses[0] == losses[1] else [f"step {step}: {losses}"]
        graphs = graphs or counters["stats"]["unique_graphs"]
    later = counters["stats"]["unique_graphs"] - graphs
    return wrong + differences(*pair), graphs, later + sum(counters["graph_break"].values())

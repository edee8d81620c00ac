# SPDX-License-Identifier: Apache-2.0
"""Small sharded models beside what the formulas of stowage.training.scaling say of them: counters
on every collective, and bytes of every tensor that lives."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from peaks import peak_beside_collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import record_function
from torch.utils._pytree import tree_map

import stowage
from stowage.training import RECIPES, convert_float8, refresh_scales
from stowage.training.scaling import PLAIN, Group, Memory, Setting, Weight, Wire, memory, wire

WIDE = (448, 256)  # three ranks divide neither; whole blocks in each row, either way round
ODD = (7, 33)
BLOCKS = 3
ADAPTER = 4


@dataclass
class Counts:
    """Bytes that this rank gives to each call."""

    gathers: list[int] = field(default_factory=list)
    scatters: list[int] = field(default_factory=list)
    reductions: list[int] = field(default_factory=list)


@contextmanager
def counted() -> Iterator[Counts]:
    counts = Counts()
    places = {
        "all_gather_single": (counts.gathers, 1, "input_tensor"),
        "reduce_scatter_single": (counts.scatters, 1, "input"),
        "all_reduce": (counts.reductions, 0, "tensor"),
    }
    old = {name: getattr(dist, name) for name in places}

    def counting(name: str) -> Any:
        found, place, keyword = places[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            given = kwargs[keyword] if keyword in kwargs else args[place]
            found.append(given.nbytes)
            with record_function("gloo:copies"):  # whose threads may be the last to free them
                return _of_copies(old[name], args, kwargs)

        return call

    for name in places:
        setattr(dist, name, counting(name))
    try:
        yield counts
    finally:
        for name, function in old.items():
            setattr(dist, name, function)


def _of_copies(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    pairs = [(x, x.clone()) for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    copies = {id(tensor): copy for tensor, copy in pairs}
    args, kwargs = tree_map(lambda x: copies.get(id(x), x), (args, kwargs))
    result = call(*args, **kwargs)
    for tensor, copy in pairs:
        tensor.copy_(copy)
    return result


class Block(nn.Module):
    """[n, k] and [k, n]; where these are frozen, an adapter of the first."""

    def __init__(self, form: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
        super().__init__()
        n, k = shape
        self.frozen = form != PLAIN and form not in RECIPES
        layers = [
            nn.Linear(k, n, bias=False, dtype=dtype),
            nn.Linear(n, k, bias=False, dtype=dtype),
        ]
        self.layers = nn.ModuleList(layers).requires_grad_(not self.frozen)
        if self.frozen:
            self.a = nn.Parameter(torch.randn(ADAPTER, k, dtype=dtype))
            self.b = nn.Parameter(torch.randn(n, ADAPTER, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[0](x)
        if self.frozen:
            y = y + (x @ self.a.t()) @ self.b.t()
        return self.layers[1](y)


def model_of(form: str, shape: tuple[int, int], dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(form, shape, dtype) for _ in range(BLOCKS)))
    if form in RECIPES:
        convert_float8(model, form)
    elif form != PLAIN:
        stowage.stow(model, rules={"*.layers.*": form})
    return model


def groups_of(form: str, shape: tuple[int, int]) -> list[Group]:
    n, k = shape
    frozen = form != PLAIN and form not in RECIPES
    weights = [Weight(n, k, form, not frozen), Weight(k, n, form, not frozen)]
    if frozen:  # a module's own parameters come before those of its children
        weights = [Weight(ADAPTER, k), Weight(n, ADAPTER), *weights]
    return [Group(tuple(weights))] * BLOCKS


def shard(model: nn.Sequential, setting: Setting) -> None:
    shape = (setting.copies, setting.shards) if setting.copies > 1 else (setting.shards,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards")[-len(shape) :])
    policy = MixedPrecisionPolicy(param_dtype=setting.compute, reduce_dtype=setting.reduce)
    options = {"mp_policy": policy, "reshard_after_forward": setting.reshard}
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def compare(
    form: str, given: dict[str, Any], shape: tuple[int, int] = WIDE
) -> dict[str, tuple[int, int]]:
    """What was counted in a step and what the formulas say. Memory is that of rank 0."""
    setting, groups = Setting(cpu=True, **given), groups_of(form, shape)
    model = model_of(form, shape, setting.rest)
    shard(model, setting)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-3, foreach=False)
    x = torch.ones(1, shape[1], dtype=setting.compute, requires_grad=True)
    seen: dict[str, int] = {}
    hook = (
        model[1]
        .layers[1]
        .register_forward_hook(
            lambda *_: seen.__setitem__("work", sum(map(_bytes, model[1].parameters())))
        )
    )

    def step() -> None:
        for _ in range(setting.micro_batches):
            model(x).float().square().sum().backward()
        grads = {p.grad._local_tensor.untyped_storage() for p in trained}
        seen["gradient"] = sum({g._cdata: g.nbytes() for g in grads}.values())
        optimizer.step()
        optimizer.zero_grad()
        refresh_scales(model)

    step()
    hook.remove()
    with counted() as counts:
        step()
    seen["rest"] = sum(_bytes(p._local_tensor, True) for p in model.parameters())
    states = [v for state in optimizer.state.values() for v in state.values()]
    seen["optimizer"] = sum(getattr(v, "_local_tensor", v).nbytes for v in states)
    with counted():
        seen["peak"] = seen["rest"] + seen["optimizer"] + peak_beside_collectives(step)
    return _beside(wire(groups, setting), memory(groups, setting), counts, seen)


def _beside(
    sent: Wire, kept: Memory, counts: Counts, seen: dict[str, int]
) -> dict[str, tuple[int, int]]:
    scales = [n for n in counts.reductions if n == sent.scales]
    copies = [n for n in counts.reductions if n != sent.scales]
    pairs = {
        "gathers": (len(counts.gathers), sent.gathers),
        "gathered": (sum(counts.gathers), sent.gathered),
        "reductions": (len(counts.scatters), sent.reductions),
        "reduced": (sum(counts.scatters), sent.reduced),
        "scale_reductions": (len(scales), sent.scale_reductions),
        "scales": (sum(scales), sent.scales),
        "copy_reductions": (len(copies), sent.copy_reductions),
        "copied": (sum(copies), sent.copied),
    }
    return pairs | {name: (seen[name], getattr(kept, name)) for name in seen}


def _bytes(tensor: Any, at_rest: bool = False) -> int:
    """Memory behind a parameter; of a gathered one without what all rows share."""
    if isinstance(tensor, stowage.sharding.StowedRows):
        inner = [tensor._records, *tensor._shared()]
    elif isinstance(tensor, stowage.StowedTensor):
        inner = list(tensor.parts.values())
        inner = inner if at_rest else inner[:2]
    else:
        inner = [getattr(tensor, "_value", getattr(tensor, "_records", tensor))]
    return sum(part.untyped_storage().nbytes() for part in inner)


def compare_all(cases: list[tuple[Any, ...]]) -> list[dict[str, tuple[int, int]]]:
    return [compare(*case) for case in cases]

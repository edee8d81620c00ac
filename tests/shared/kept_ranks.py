# SPDX-License-Identifier: Apache-2.0
"""Kept init values of weights that FSDP2 spreads: what one rank finds."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from typing import Any

import torch
import torch.distributed as dist
from peaks import peak_beside_collectives
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import stowage
from stowage.sharding import StowedRows
from stowage.training import (
    MasterOptimizer,
    clear_init_value,
    init_value,
    init_values,
    quantized_init,
)


class Uneven(nn.Module):
    """Rows that two ranks cannot share alike, and a weight of which one has none."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(33, 7), nn.Linear(7, 5)
        self.c = nn.Linear(5, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))  # type: ignore[no-any-return]

    def reset_parameters(self) -> None:
        for layer in (self.a, self.b, self.c):
            nn.init.trunc_normal_(layer.weight, std=0.05)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def build(context: Any, meta: bool, prepare: bool = False) -> Uneven:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(3)
    with context:
        with torch.device("meta" if meta else "cpu"):
            model = Uneven()
        if meta:  # a copy's weights are its own modules'
            model = copy.deepcopy(model)
        if prepare:
            stowage.sharding.prepare(model)
        fully_shard(model, mesh=mesh)
        if meta:
            model.to_empty(device="cpu")
            model.reset_parameters()
    return model


def values_of(cases: list[tuple[str, bool]], prepare: bool = False) -> list[Any]:
    """For each case, the bytes kept of each weight here; `prepare` as for tensor parallelism."""
    counts = []
    for storage, meta in cases:
        want = build(contextlib.nullcontext(), meta)
        model = build(quantized_init(storage, preserve_init=True), meta, prepare)
        for (name, p), (_, q) in zip(
            model.named_parameters(), want.named_parameters(), strict=True
        ):
            mine: Any = q.to_local()  # type: ignore[attr-defined]
            if name.endswith("bias"):
                assert torch.equal(p.to_local(), mine), name  # type: ignore[attr-defined]
                continue
            case = (storage, meta, name)
            assert isinstance(p._local_tensor, StowedRows), case  # type: ignore[attr-defined]
            assert torch.equal(init_value(p), mine), case
            whole = stowage.quantize(q.full_tensor(), storage)  # type: ignore[attr-defined]
            got = p.full_tensor()  # type: ignore[attr-defined]
            for part, value in whole.parts.items():
                assert torch.equal(got.parts[part], value), (*case, part)
        model.half().float()
        counts.append([value.nbytes for value in init_values(model)])
        dead = weakref.ref(init_value(model.a.weight))
        clear_init_value(model.a.weight)
        assert dead() is None and init_value(model.b.weight) is not None
    return counts


def read_as(dtype: torch.dtype) -> bool:
    """Whether rows give their exact values in another type, while they are being initialised."""
    with quantized_init("nf4", preserve_init=True):
        model = build(contextlib.nullcontext(), False)
        rows: Any = model.a.weight._local_tensor
        exact = rows.dequantize(dtype)
        return exact.dtype is dtype and torch.equal(exact, init_value(model.a.weight).to(dtype))


def whole_values_die() -> bool:
    """Of a model that was made whole and then sharded, nothing of the whole stays."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    with quantized_init("f8_e4m3:tensor", preserve_init=True):
        model = Uneven()
    dead = [weakref.ref(init_value(layer.weight)) for layer in (model.a, model.b, model.c)]
    assert all(ref() is not None for ref in dead)
    fully_shard(model, mesh=mesh)
    gc.collect()
    return all(ref() is None for ref in dead)


def first_forward_ends() -> list[bool]:
    """Whether something is kept before and after a forward of the sharded model."""
    model = build(quantized_init("nf4", preserve_init=True, until="first_forward"), True)
    before = any(value.nbytes for value in init_values(model))
    model(torch.ones(2, 33))
    return [before, any(value.nbytes for value in init_values(model))]


def master_first(width: int, layers: int) -> list[int]:
    """Peak of the construction from meta, and what its formula says: local masters, local rest, and
    one parameter (whole)."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    held: list[Any] = []

    def make() -> None:
        held.clear()
        with quantized_init("f8_e4m3:tensor", master_first=True):
            with torch.device("meta"):
                model = nn.Sequential(*(nn.Linear(width, width, False) for _ in range(layers)))
            fully_shard(model, mesh=mesh)
            model.to_empty(device="cpu")
            for layer in model:
                layer.reset_parameters()
        held.extend([model, MasterOptimizer(torch.optim.SGD, model, lr=0.1)])

    make()
    held.clear()
    peak = peak_beside_collectives(make)
    model, optimizer = held
    for name, master in optimizer.masters.items():
        kept = init_value(model.get_parameter(name))
        assert master._local_tensor.data_ptr() == kept.data_ptr()  # that very tensor
    local = layers * width * width // dist.get_world_size()
    return [peak, 4 * local + local + 4 * layers, 4 * width * width]


def refused_alike(budgets: list[int]) -> list[str]:
    """By a rank that has fewer rows, too: none waits for another."""
    found = []
    for budget in budgets:
        try:
            build(quantized_init("f8_e4m3:tensor", preserve_init=True, budget=budget), True)
            found.append("all kept")
        except ValueError as error:
            found.append(str(error))
    return found


def load_invalidates(folder: str) -> list[str]:
    """States before and after a checkpoint of the sharded model is loaded."""
    model = build(quantized_init("f8_e4m3:tensor", preserve_init=True), False)
    stowage.sharding.save(model, folder)
    before = [value.state for value in init_values(model)]
    stowage.sharding.load(model, folder)
    return before + [value.state for value in init_values(model)]


def ends(folder: str) -> tuple[bool, list[bool], list[str]]:
    """What the three above find."""
    return whole_values_die(), first_forward_ends(), load_invalidates(folder)

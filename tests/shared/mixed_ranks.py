# SPDX-License-Identifier: Apache-2.0
"""Mixtures whose experts are spread over ranks and rest in a file, and whose other weights FSDP2 or
tensor parallelism spreads: what each rank does of the tests."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import expert_ranks
import torch
import torch.distributed as dist
from expert_models import IDS
from expert_ranks import EXPERTS, _counts, _refused, build, logits, stacks
from torch import nn

import stowage
from stowage._ops import _torch
from stowage._shard.own_matrices import gathered
from stowage._shard.rows import RESTING


def on_meta(folder: str, sizes: dict[str, int], family: str = "Qwen3Moe") -> Any:
    """Spread as `from_pretrained(distributed_config=)` of transformers spreads it."""
    from transformers.distributed import DistributedConfig

    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world)
    model = stowage.load(lambda: build(family), folder, device="meta")
    stowage.sharding.prepare(model)
    config, _, meshes = model.prepare_distribute_model(DistributedConfig(**sizes))
    return model.maybe_distribute_model(model, config, meshes)


def beside(model: nn.Module) -> int:
    """Bytes here of what is spread and no experts."""
    spread = (p for p in model.parameters() if hasattr(p, "placements"))
    return sum(stowage.nbytes(p) for p in spread if not any(p is s for s in stacks(model).values()))


def in_files(folder: str, sizes: dict[str, int], family: str = "Qwen3Moe") -> None:
    """Results are those of all that is here in memory, within a budget that counts what stays."""
    plain, model = (on_meta(folder, sizes, family) for _ in range(2))
    stowage.sharding.load(plain, folder)
    stay, largest = beside(plain), max(map(stowage.nbytes, stacks(plain).values()))
    each = largest // next(iter(stacks(plain).values())).to_local().shape[0] + (4 << 12)
    for more in (0, 4096):
        load = partial(stowage.sharding.load, model, folder, ram=stay + more)
        _refused(load, f"{stay} bytes of")
    assert all(stack.is_meta for stack in stacks(model).values())
    ram = stay + 4 * each + (256 << 10)
    stowage.sharding.load(model, folder, ram=ram, reads="buffered")
    assert not gathered(model) & {id(stack) for stack in stacks(model).values()}
    rows = stowage.report(model)
    for name, stack in stacks(model).items():
        assert isinstance(stack.to_local(), stowage.StowedTensor)
        assert rows[name].tier == "disk" and "in the file" in rows[name].reason
        assert rows[name].whole_bytes == stowage.nbytes(plain.get_parameter(name)) * _ranks(stack)
    for way in ("grouped_mm", "batched_mm"):
        for ids in (IDS, IDS[:, :1]):
            assert torch.equal(logits(model, way, ids), logits(plain, way, ids)), (sizes, way)
    report = stowage.engine_report(model)
    assert report.bytes_read > 0 and report.peak <= ram - stay and report.borrowed == 0
    first = next(iter(stacks(model).values()))
    here = {_first(first) + i for i in range(len(first.to_local()))}
    assert {expert for _, expert in _counts(model)} <= here
    _refused(lambda: stowage.rebudget(model, stay + 4096), f"those that stay in memory, {stay}")
    stowage.rebudget(model, ram + each)
    again = logits(model, "grouped_mm")
    stowage.onload(model)
    assert torch.equal(logits(model, "grouped_mm"), again)


def refused_before_a_change(folder: str, sizes: dict[str, int]) -> None:
    """Of a model that has values: what one rank refuses changes them in none."""
    model, first = on_meta(folder, sizes), dist.get_rank() == 0
    stowage.sharding.load(model, folder)

    def values() -> list[torch.Tensor]:
        found = (_torch.local_of(p) for p in model.parameters())
        return [p for p in found if not isinstance(p, RESTING) and p.numel()]

    with torch.no_grad():
        for value in values():
            value.fill_(3.0)
    small, enough = "1KiB", "64MiB"
    load = partial(stowage.sharding.load, model, folder)
    _refused(lambda: load(ram=small if first else enough), f"{beside(model)} bytes of")
    _refused(lambda: load(**({"ram": enough} if first else {})), "in every process or in none")
    assert len(values()) > 5 and all(bool((value == 3).all()) for value in values())
    assert not any(stack.is_meta for stack in stacks(model).values())
    load(ram=enough)
    assert not any(bool((value == 3).all()) for value in values())


def _ranks(stack: Any) -> int:
    return int(stack.shape[0] // stack.to_local().shape[0])


def _first(stack: Any) -> int:
    _, offsets = _torch.compute_local_shape_and_global_offset(
        stack.shape, stack.device_mesh, stack.placements
    )
    return int(offsets[0])


def trained(folder: str, sizes: dict[str, int]) -> None:
    """Of a plain weight that FSDP2 gathers, and of an adapter, gradients are the same."""
    gradients = []
    for ram in (None, "4MiB"):
        model = on_meta(folder, sizes)
        stowage.sharding.load(model, folder, **({} if ram is None else {"ram": ram}))
        model.set_experts_implementation("grouped_mm")
        gate = model.model.layers[0].mlp.gate.weight
        gate.requires_grad_(True)
        added = nn.Parameter(torch.zeros(256, dtype=torch.bfloat16))
        model.model.layers[0].mlp.register_forward_pre_hook(lambda _, x, a=added: (x[0] + a,))
        own = IDS[dist.get_rank() % 2 :][:1]
        model(own, labels=own).loss.backward()
        assert added.grad is not None and added.grad.any()
        assert gate.grad is not None
        gradients.append((added.grad, gate.grad.to_local()))
        if ram is not None:
            assert stowage.engine_report(model).bytes_read > 0
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def ignored(folder: str, to: str) -> None:
    """`fully_shard` of all but the experts, as its `ignored_params` say; and what is written."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, whole = init_device_mesh("cpu", (dist.get_world_size(),)), stowage.load(build, folder)

    def spread() -> Any:
        model = stowage.load(build, folder, device="meta")
        expert_ranks.spread(model, mesh)
        experts = set(stacks(model).values())
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, ignored_params=experts)
        return fully_shard(model, mesh=mesh, ignored_params=experts)

    model = spread()
    stowage.sharding.load(model, folder, ram="4MiB")
    found = logits(model, "grouped_mm")
    assert expert_ranks.close(found, logits(whole, "grouped_mm"))
    stowage.sharding.check(model)
    stowage.save(model, f"{to}/flat")
    again = stowage.load(build, f"{to}/flat")
    assert all(expert_ranks.same(p, again.get_parameter(n)) for n, p in whole.named_parameters())
    stowage.sharding.save(model, f"{to}/checkpoint")
    other = spread()
    stowage.sharding.load(other, f"{to}/checkpoint")
    assert torch.equal(logits(other, "grouped_mm"), found)
    loaded = spread()  # over what had values, and was gathered
    stowage.sharding.load(loaded, folder)
    logits(loaded, "eager")
    stowage.sharding.load(loaded, folder, ram="4MiB")
    assert torch.equal(logits(loaded, "grouped_mm"), found)
    assert stowage.engine_report(loaded).bytes_read > 0


def planned(folder: str, sizes: dict[str, int], to: str) -> None:
    """What is spread otherwise stays in each rank's plan, and counts."""
    model = on_meta(folder, sizes)
    stay = beside(model)

    def within(ram: int | str) -> stowage.Plan:
        return stowage.plan(model, ram=ram, links=expert_ranks.links())

    every = within("1GiB")
    units = {unit.name: unit for unit in every.units}
    spread = [
        units[n] for n, p in model.named_parameters() if hasattr(p, "placements") and n in units
    ]
    assert spread and all(unit.stays and unit.tier == "ram" for unit in spread)
    assert any("spread over processes" in unit.why for unit in spread)
    assert stay <= sum(unit.bytes for unit in spread) < stay + 4096 * len(spread)
    experts = [unit for unit in every.units if unit.name.endswith("]")]
    assert len(experts) == 2 * 2 * EXPERTS // _ranks(next(iter(stacks(model).values())))
    plan = within(every.predicted.peak["ram"] - 4 * experts[0].bytes)
    where = Path(to) / f"plan{dist.get_rank()}.json"
    plan.save(where)
    assert plan.names("disk")
    stowage.sharding.load(model, folder, plan=where)
    plain = on_meta(folder, sizes)
    stowage.sharding.load(plain, folder)
    for ids in (IDS, IDS[:, :1]):
        assert torch.equal(logits(model, "grouped_mm", ids), logits(plain, "grouped_mm", ids))
    assert stowage.engine_report(model).peak + stay <= plan.predicted.peak["ram"]
    stowage.rebudget(model, plan.predicted.peak["ram"] + 2 * experts[0].bytes)
    assert torch.equal(logits(model, "grouped_mm"), logits(plain, "grouped_mm"))

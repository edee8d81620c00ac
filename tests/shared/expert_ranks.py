# SPDX-License-Identifier: Apache-2.0
"""Mixtures whose experts are spread over ranks by transformers' expert parallelism: what each rank
does of the tests."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from expert_models import IDS
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import stowage
from stowage._ops import library
from stowage.planning import machine_key

EXPERTS, PAGES = 8, 6 * 4096


def build(family: str = "Qwen3Moe") -> Any:
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 256, "intermediate_size": 128,
        "moe_intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "num_experts_per_tok": 2,
        "max_position_embeddings": 64, "pad_token_id": 0, "num_local_experts": EXPERTS,
    }  # fmt: skip
    if family == "Qwen3Moe":
        sizes |= {"num_experts": EXPERTS}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def stacks(model: nn.Module) -> dict[str, nn.Parameter]:
    return {n: p for n, p in model.named_parameters() if ".experts." in n and p.dim() == 3}


def spread(model: nn.Module, mesh: DeviceMesh, how: str = "auto", alone: bool = False) -> None:
    """By transformers' own call, as `from_pretrained(distributed_config=)` makes it. `alone`: each
    rank has tokens of its own."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    every = {n for n, p in model.named_parameters() if ".experts." in n and p.shape[0] == EXPERTS}
    plan = dict.fromkeys(sorted(every), "grouped_gemm")
    plan |= dict.fromkeys(sorted({n.rpartition(".")[0] for n in every}), "ep_dispatch_experts")
    others = DeviceMesh("cpu", [dist.get_rank()]) if alone else mesh
    apply_expert_parallelism(model, mesh, others, plan, ep_implementation=how)


def logits(model: Any, way: str, ids: torch.Tensor = IDS) -> torch.Tensor:
    model.set_experts_implementation(way)
    with torch.no_grad():
        found: torch.Tensor = model(ids).logits
    return found


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Sums over ranks are of two roundings where those in one process are of one."""
    return torch.allclose(one.float(), other.float(), rtol=0.02, atol=0.02)


def in_files(world: int, cases: Sequence[tuple[str, str]]) -> None:
    """A family, and a folder with a model of it."""
    for family, folder in cases:
        _in_file(world, family, folder)


def _in_file(world: int, family: str, folder: str) -> None:
    """Each rank's experts stay in the file, within its budget; nobody reads those of another."""
    mesh, make = init_device_mesh("cpu", (world,)), lambda: build(family)
    whole = stowage.load(make, folder)
    model = stowage.load(make, folder, device="meta")
    spread(model, mesh)
    of_experts = sum(stowage.nbytes(p) for p in stacks(whole).values())
    one, others = of_experts // (2 * EXPERTS) + 2 * PAGES, stowage.nbytes(whole) - of_experts
    ram = others + 4 * one
    stowage.sharding.load(model, folder, ram=ram, reads="buffered")
    here = range(dist.get_rank() * EXPERTS // world, (dist.get_rank() + 1) * EXPERTS // world)
    for stack in stacks(model).values():
        local = stack.to_local()
        assert isinstance(local, stowage.StowedTensor) and len(local) == len(here)
    # Of transformers' gpt-oss the loop over experts knows no experts of other ranks.
    ways = ("grouped_mm", "batched_mm") if family == "GptOss" else ("grouped_mm", "eager")
    logits(model, ways[0], IDS[:1, :1])
    read, used = stowage.engine_report(model).bytes_read, sum(_counts(model).values())
    assert read <= others + one * used, (family, folder, read, others, one, used)
    for way in ways:
        for ids in (IDS, IDS[:1, :1]):
            assert close(logits(model, way, ids), logits(whole, way, ids)), (family, folder, way)
    report = stowage.engine_report(model)
    assert report.peak <= ram and report.borrowed == 0
    used_here = {expert for _, expert in _counts(model)}
    assert used_here and used_here <= set(here)
    _as_a_model(model, whole, ways[0], ram)


def _counts(model: Any) -> Counter[tuple[str, int]]:
    """Of each expert that was used the uses, in both of its stacks."""
    found: Counter[tuple[str, int]] = Counter()
    for name, uses in stowage.uses(model).weights.items():
        for expert, count in enumerate(uses.by_index):
            if count:
                found[name, expert] += count
    return found


def _as_a_model(model: Any, whole: Any, way: str, ram: int) -> None:
    wanted = logits(whole, way)
    name, stack = next(iter(stacks(model).items()))
    first = dist.get_rank() * EXPERTS // dist.get_world_size()
    local, all_of_it = stack.to_local(), whole.get_parameter(name)
    assert torch.equal(local.dequantize(), all_of_it[first : first + len(local)].dequantize())
    stowage.sharding.check(model)
    assert f"of {EXPERTS}" in str(stowage.report(model)[name])
    stowage.rebudget(model, 2 * ram)
    assert close(logits(model, way), wanted)
    stowage.onload(model)
    assert close(logits(model, way), wanted)
    assert isinstance(stacks(model)[name].data, DTensor)


def trained(world: int, folder: str) -> None:
    """An adapter beside experts that rest in a file, with tokens of each rank's own."""
    mesh = init_device_mesh("cpu", (world,))
    own = IDS[dist.get_rank() % 2 : dist.get_rank() % 2 + 1]
    gradients = []
    for ram in (None, "4MiB"):
        model = stowage.load(build, folder, device="meta")
        spread(model, mesh, "all_to_all", alone=True)
        stowage.sharding.load(model, folder, **({} if ram is None else {"ram": ram}))
        model.set_experts_implementation("grouped_mm")
        added = nn.Parameter(torch.zeros(256, dtype=torch.bfloat16))
        model.model.layers[0].mlp.register_forward_pre_hook(lambda _, x, a=added: (x[0] + a,))
        model(own, labels=own).loss.backward()
        assert added.grad is not None and added.grad.any()
        gradients.append(added.grad)
        if ram is not None:
            report = stowage.engine_report(model)
            assert report.borrowed == 0 and report.peak <= 4 << 20
    assert torch.equal(*gradients)


def refusals(world: int, folder: str, checkpoint: str) -> None:
    mesh = init_device_mesh("cpu", (world,))
    model = stowage.load(build, folder, device="meta")
    spread(model, mesh)
    _refused(lambda: stowage.sharding.load(model, folder, ram="4KiB"), "must hold the largest")
    little = "4KiB" if dist.get_rank() == 0 else "4MiB"  # of one rank alone
    _refused(lambda: stowage.sharding.load(model, folder, ram=little), "must hold the largest")
    there, rules = f"{folder}-plain", {"*.experts.*_proj": "int8:row2"}
    resting = stowage.load(build, there, rules=rules, device="meta")
    spread(resting, mesh)
    _refused(lambda: stowage.sharding.load(resting, there, ram="4MiB"), "must rest in the file, to")
    _refused(
        lambda: stowage.sharding.load(model, folder, reads="direct"), "must come with ram or plan"
    )
    _refused(lambda: stowage.sharding.load(model, checkpoint, ram="4MiB"), "must come with a file")
    assert all(stack.is_meta for stack in stacks(model).values())
    there = f"{checkpoint}/new"
    in_memory = stowage.load(build, folder, device="meta")
    spread(in_memory, mesh)
    stowage.sharding.load(in_memory, folder)
    _refused(lambda: stowage.offload(in_memory, ram="4MiB", folder=there), "must be whole to go")
    assert not Path(there).exists()
    stowage.sharding.load(model, folder, ram="4MiB")
    _refused(lambda: stowage.sharding.load(model, folder, ram="4MiB"), "must not be offloaded")


def _refused(call: Callable[[], object], text: str) -> None:
    try:
        call()
    except stowage.StowageError as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"{text}: nothing was raised")


def budgets(world: int, folder: str) -> list[int]:
    """Ranks need not have the same memory."""
    model = stowage.load(build, folder, device="meta")
    spread(model, init_device_mesh("cpu", (world,)))
    ram = (3 + dist.get_rank()) << 20
    stowage.sharding.load(model, folder, ram=ram)
    logits(model, "eager")
    copied = copy.deepcopy(model)
    assert torch.equal(logits(copied, "eager"), logits(model, "eager"))
    assert stowage.engine_report(model).peak <= ram
    return [ram]


def planned(world: int, folder: str, to: str) -> None:
    """Each rank's plan is for its own experts, and keeps those that are used most."""
    rank, each = dist.get_rank(), EXPERTS // world
    here = range(rank * each, (rank + 1) * each)
    whole, mesh = stowage.load(build, folder), init_device_mesh("cpu", (world,))
    model = stowage.load(build, folder, device="meta")
    spread(model, mesh)
    counts = [500 if expert % each == 1 else 1 for expert in range(EXPERTS)]
    weights = {name: {"hits": 1, "by_index": counts} for name in stacks(model)}
    uses, where = Path(to) / f"uses{rank}.json", Path(to) / f"plan{rank}.json"
    uses.write_text(json.dumps({"stowage_uses": 1, "weights": weights}))

    def within(ram: int | str, of: nn.Module = model) -> stowage.Plan:
        return stowage.plan(of, ram=ram, uses=uses, links=links())

    every = within("1GiB")
    experts = [unit for unit in every.units if unit.name.endswith("]")]
    assert {unit.name for unit in experts} == {f"{n}[{i}]" for n in stacks(model) for i in here}
    assert abs(sum(unit.uses for unit in experts) / len(stacks(model)) - 2 / world) < 1e-6
    plan = within(every.predicted.peak["ram"] - 4 * experts[0].bytes)
    kept = {f"{name}[{here[1]}]" for name in stacks(model)}
    assert plan.names("disk") and kept <= set(plan.names("ram")), plan
    plan.save(where)
    found, keep = [], library.engine_keep
    library.engine_keep = lambda *given: found.append(keep(*given))
    stowage.sharding.load(model, folder, plan=where)
    logits(model, "grouped_mm")
    library.engine_keep = keep
    assert found == [len(plan.names("ram"))], (found, plan)
    for _ in range(3):
        assert close(logits(model, "grouped_mm"), logits(whole, "grouped_mm"))
    assert stowage.engine_report(model).peak <= plan.predicted.peak["ram"]
    stowage.rebudget(model, plan.predicted.peak["ram"] + 2 * experts[0].bytes)
    assert close(logits(model, "grouped_mm"), logits(whole, "grouped_mm"))
    other = stowage.load(build, folder, device="meta")
    spread(other, mesh)
    for_all = within("1GiB", whole)
    _refused(lambda: stowage.sharding.load(other, folder, plan=for_all), "must be made for the")
    _refused(
        lambda: stowage.sharding.load(other, folder, plan=plan, ram="1GiB"), "must come without"
    )
    assert all(stack.is_meta for stack in stacks(other).values())


def links() -> dict[str, object]:
    cpu = {"read": 8e9, "multiply": 2e11}
    return {
        "key": machine_key(),
        "disk": 2e9,
        "cached": 4e9,
        "memcpy": 8e9,
        "linear": {name: cpu for name in ("int8", "nf4", "bf16", "f32")},
        "accelerators": {},
    }


def written(world: int, folder: str, to: str) -> None:
    """What is spread so, in memory or in a file, is written whole, as it rests."""
    mesh, whole = init_device_mesh("cpu", (world,)), stowage.load(build, folder)
    for number, given in enumerate(({}, {"ram": "4MiB"})):
        model = stowage.load(build, folder, device="meta")
        spread(model, mesh)
        stowage.sharding.load(model, folder, **given)
        stowage.sharding.check(model)
        for name, stack in stacks(model).items():
            assert gives_values(stack, whole.get_parameter(name)), name
        stowage.save(model, f"{to}/flat{number}")
        again = stowage.load(build, f"{to}/flat{number}")
        assert all(same(p, again.get_parameter(n)) for n, p in whole.named_parameters())
        stowage.sharding.save(model, f"{to}/checkpoint{number}")
        other = stowage.load(build, folder, device="meta")
        spread(other, mesh)
        stowage.sharding.load(other, f"{to}/checkpoint{number}")
        for name, stack in stacks(other).items():
            assert same(stack.to_local(), stacks(model)[name].to_local()), name
        flat = stowage.load(build, folder, device="meta")  # and in one process
        stowage.sharding.load(flat, f"{to}/checkpoint{number}")
        assert all(same(p, flat.get_parameter(n)) for n, p in whole.named_parameters())


def gives_values(spread: Any, whole: Any) -> bool:
    """By DTensor's own gather, which widens what it sends."""
    found = spread.full_tensor()
    assert not isinstance(found, stowage.StowedTensor)
    return bool(torch.equal(found, whole.dequantize(found.dtype)))


def same(one: Any, other: Any) -> bool:
    if not isinstance(one, stowage.StowedTensor):
        return bool(torch.equal(one, other))
    assert isinstance(other, stowage.StowedTensor) and one.resting == other.resting
    return all(map(torch.equal, one.parts.values(), other.parts.values()))


class Grouped(nn.Module):
    """Experts as torchtitan has them: products of what is here, for tokens in order of expert."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, 128, 256) / 16)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, 256, 128) / 16)

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        w1, w2 = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w2))
        return stowage.grouped_linear(stowage.grouped_linear(x, w1, ends).relu(), w2, ends)


def partitioned(world: int, folder: str) -> None:
    """By `distribute_tensor` of each parameter, with and without a scatter."""
    mesh, whole = init_device_mesh("cpu", (world,)), stowage.load(Grouped, folder)
    ends = [0, *range(1, EXPERTS)]
    x = torch.randn(EXPERTS - 1, 256, generator=torch.Generator().manual_seed(1))
    each = EXPERTS // world
    first = dist.get_rank() * each
    own = ends[first : first + each]
    start = 0 if first == 0 else ends[first - 1]
    wanted = whole(x, ends)[start : own[-1]]
    for prepares in (False, True):
        for source in (0, None):
            model = stowage.load(Grouped, folder, device="meta")
            if prepares:
                stowage.sharding.prepare(model)
            for name, weight in list(model.named_parameters(recurse=False)):
                placed = distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=source)
                model.register_parameter(name, nn.Parameter(placed, requires_grad=False))
            stowage.sharding.load(model, folder, ram="300KiB")
            got = model(x[start : own[-1]], [end - start for end in own])
            assert torch.equal(got, wanted), (prepares, source)
            counted = stowage.uses(model).weights.values()
            used = {e for uses in counted for e, n in enumerate(uses.by_index) if n}
            assert used and used <= set(range(first, first + each))


def over_a_dimension(folder: str) -> None:
    """Of a mesh of two: pairs that have the same experts, each with tokens of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    whole, model = stowage.load(build, folder), stowage.load(build, folder, device="meta")
    spread(model, mesh["ep"])
    stowage.sharding.load(model, folder, ram="4MiB")
    own = IDS[mesh.get_local_rank("dp") :][:1]
    for way in ("grouped_mm", "eager"):
        assert close(logits(model, way, own), logits(whole, way, own))
    first = mesh.get_local_rank("ep") * EXPERTS // 2
    used = {expert for _, expert in _counts(model)}
    assert used and used <= set(range(first, first + EXPERTS // 2))
    for name, stack in stacks(model).items():
        assert gives_values(stack, whole.get_parameter(name)), name


def over_a_dimension_gathered(folder: str, to: str) -> None:
    """Pairs that have the same experts, whose rows `fully_shard` spreads over each pair."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    whole, model = stowage.load(build, folder), stowage.load(build, folder, device="meta")
    spread(model, mesh["ep"])
    for layer in model.model.layers:
        fully_shard(layer.mlp.experts, mesh=mesh["dp"])
    stowage.sharding.load(model, folder)
    stowage.sharding.check(model)
    assert close(logits(model, "grouped_mm"), logits(whole, "grouped_mm"))
    stowage.sharding.save(model, to)
    flat = stowage.load(build, folder, device="meta")
    stowage.sharding.load(flat, to)
    assert all(same(p, flat.get_parameter(n)) for n, p in whole.named_parameters())


def uneven(folder: str, to: str) -> None:
    """Eight experts of three ranks, under a default device and autocast; exact ones stay so."""
    mesh, whole = init_device_mesh("cpu", (3,)), stowage.load(Grouped, folder)
    first = 3 * dist.get_rank()
    for given in ({}, {"ram": "300KiB"}):
        model = stowage.load(Grouped, folder, device="meta", exact=True)
        for name, weight in list(model.named_parameters(recurse=False)):
            placed = distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None)
            model.register_parameter(name, nn.Parameter(placed, requires_grad=False))
        with torch.device("meta"):
            stowage.sharding.load(model, folder, **given)
        for name, weight in model.named_parameters():
            local, all_of_it = weight.to_local(), whole.get_parameter(name)
            assert local._exact and local.device.type == "cpu"
            assert torch.equal(local.dequantize(), all_of_it.dequantize()[first : first + 3])
            assert gives_values(weight, all_of_it)
        x, ends = torch.randn(4, 256), [2, *[4] * (min(3, EXPERTS - first) - 1)]
        with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
            assert model(x, ends).isfinite().all()
        stowage.save(model, to + str(len(given)))
        again = stowage.load(Grouped, to + str(len(given)))
        assert all(same(p, again.get_parameter(n)) for n, p in whole.named_parameters())

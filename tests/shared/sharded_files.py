# SPDX-License-Identifier: Apache-2.0
"""What tests do with DTensors and checkpoints of resting weights in several processes."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sharded import bases, blocks, bytes_of, flat_bytes, shard, train
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import stowage
from stowage import sharding
from stowage.training import convert_float8


def replicated_and_sharded(mesh: Any, storage: str, shape: tuple[int, ...]) -> None:
    """distribute_tensor from process 0, whose bytes the others do not have, and back."""
    torch.manual_seed(0)
    want = stowage.quantize(torch.randn(shape), storage)
    mine = want if mesh.get_rank() == 0 else stowage.quantize(torch.ones(shape), storage)
    x = torch.randn(2, shape[1])
    for placement in (Shard(0), Replicate()):
        prepared = sharding.prepare(mine.detach().clone())
        spread = distribute_tensor(prepared, mesh, [placement])
        assert flat_bytes(spread) == flat_bytes(want), placement
        again = spread.redistribute(placements=[Replicate()])
        assert isinstance(again.to_local(), stowage.StowedTensor)
        assert torch.equal(nn.functional.linear(x, again.to_local()), nn.functional.linear(x, want))
        back = again.redistribute(placements=[Shard(0)])
        local = back.to_local()
        first = (local.first if isinstance(local, sharding.StowedRows) else 0) or 0
        rows = want.dequantize()[first : first + local.shape[0]]
        assert torch.equal(local.dequantize(), rows)
        assert flat_bytes(back) == flat_bytes(want), placement
    try:
        columns = distribute_tensor(sharding.prepare(want), mesh, [Shard(1)])
        assert flat_bytes(columns) == flat_bytes(want)
    except stowage.Unsupported as error:
        assert "can be sharded along dim 1 only where blocks allow it" in str(error), error


def saved(mesh: Any, folder: str, storage: str, shape: tuple[int, int], steps: int) -> list[bytes]:
    """Trains a little, saves records with DCP and flat bytes; returns all bytes of the model."""
    model = shard(blocks(storage, shape), mesh)
    train(model, shape[1], steps)
    sharding.save(model, f"{folder}/records")
    stowage.save(model, f"{folder}/flat")
    return bytes_of(model)


def loaded(mesh: Any, folder: str, storage: str, shape: tuple[int, int], spread: bool) -> Any:
    """The bytes of a fresh model after a load, and the losses that follow."""
    model = blocks(storage, shape)
    with torch.no_grad():
        for parameter in model.parameters():
            if not isinstance(parameter, stowage.StowedTensor):
                parameter.zero_()
    other = blocks(storage, shape)
    stowage.unstow(other)
    for name, weight in bases(model).items():
        weight.copy_(other.get_parameter(name) * 0.5)
    if spread:
        shard(model, mesh)
        model(torch.randn(2, shape[1]))  # the gathered weights of before must not be used again
    sharding.load(model, f"{folder}/records")
    found = bytes_of(model)
    return found, train(model, shape[1])


def load_refused(mesh: Any, folder: str, storage: str, shape: tuple[int, int], dtype: Any) -> str:
    model = blocks(storage, shape).to(dtype)
    try:
        sharding.load(shard(model, mesh), f"{folder}/records")
    except stowage.BadFile as error:
        return str(error)
    raise AssertionError("not refused")


def refusals(mesh: Any, folders: list[str], storage: str) -> list[str]:
    """What a load of each folder says, and that it has changed nothing."""
    model = shard(blocks(storage, (7, 33)), mesh)
    before, texts = bytes_of(model), []
    for folder in folders:
        try:
            sharding.load(model, folder)
        except stowage.BadFile as error:
            texts.append(str(error))
        assert bytes_of(model) == before, folder
    return texts


def saved_async(mesh: Any, folder: str) -> None:
    """What is saved while training goes on is the state of before."""
    model = shard(blocks("nf4:nested", (7, 33)), mesh)
    want = bytes_of(model)
    group = dist.new_group(backend="gloo")
    saving = async_save(sharding.state_dict(model), checkpoint_id=folder, process_group=group)
    train(model, 33, 1)
    saving.result()
    assert bytes_of(model) != want
    sharding.load(model, folder)
    assert bytes_of(model) == want


class Declared(nn.Sequential):
    """As models of diffusers: it writes its own configuration, with the name of its class."""

    def save_config(self, folder: Any) -> None:
        facts = {"_class_name": type(self).__name__, "width": 33}
        Path(folder, "config.json").write_text(json.dumps(facts))


def mixed(kind: type[nn.Sequential] = Declared) -> nn.Sequential:
    """Frozen nf4, an fp8 layer that trains, a plain one."""
    torch.manual_seed(0)
    model = kind(nn.Linear(33, 7), nn.Linear(7, 5), nn.Linear(5, 3))
    model[0].requires_grad_(False)
    stowage.stow(model, rules={"0.weight": "nf4:nested"})
    convert_float8(model, "rowwise", filter=lambda name, _: name == "1")
    return model


def saved_values(mesh: Any, folder: str) -> None:
    """Flat bytes, and values in another dtype, of a model of several kinds of weights."""
    model = mixed()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    stowage.save(model, f"{folder}/flat")
    stowage.save(model, f"{folder}/values", dtype=torch.bfloat16)


def records_of_mixed(mesh: Any, folder: str) -> None:
    """Saves all kinds of weights; a model of other values that loads them computes the same."""
    model, other = mixed(), mixed()
    with torch.no_grad():
        for parameter in other.parameters():
            if not isinstance(parameter, stowage.StowedTensor):
                parameter.mul_(3)
    x = torch.ones(2, 33)
    for each in (model, other):
        for layer in each:
            fully_shard(layer, mesh=mesh)
        fully_shard(each, mesh=mesh)
        each(x)
    sharding.save(model, folder)
    sharding.load(other, folder)
    assert torch.equal(model(x), other(x))


def reported() -> tuple[dict[str, tuple[str, str | None, int, int]], str, int]:
    """Of each weight which rows are here, what travels, bytes here and bytes of all."""
    model = mixed()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[1], mesh=mesh)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    report = stowage.report(model)
    assert report.rest_bytes == stowage.nbytes(model)
    rows = {r.name: (r.shard, r.wire, r.rest_bytes, r.whole_bytes) for r in report.rows}
    return rows, str(report), report.whole_bytes

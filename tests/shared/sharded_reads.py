# SPDX-License-Identifier: Apache-2.0
"""Models that are spread over processes before they have values, and then read from files: what a
rank does, and what it finds."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dialect_ranks import octets, same_parameters
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import stowage
from stowage import sharding
from stowage.training import convert_float8


class Model(nn.Module):
    """Weights of every kind: tied, one-dimensional, a table, a buffer that files have and one that
    is computed; rows that two and three processes do not divide, and fewer than there are
    processes."""

    def __init__(self, rows: int = 71) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 64)
        self.up = nn.Linear(64, 128)
        self.norm = nn.BatchNorm1d(128)
        self.down = nn.Linear(128, 64, bias=False)
        self.gate = nn.Linear(64, 2)
        self.head = nn.Linear(64, rows, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("halves", torch.arange(64) / 2, persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids) + self.halves
        x = x * self.gate(x).sigmoid().sum(-1, keepdim=True)
        return self.head(self.down(torch.relu(self.norm(self.up(x)))))


def rules(storage: str) -> dict[str, str]:
    return dict.fromkeys(("table.weight", "up.weight", "down.weight", "gate.weight"), storage)


def packed(folder: str, storage: str | None) -> nn.Module:
    """One that rests, whose file is in the folder; the first process writes it."""
    torch.manual_seed(0)
    model = Model().eval()
    model.norm.running_mean.normal_()
    if storage is not None:
        stowage.stow(model, rules=rules(storage), skip=None)
    if dist.get_rank() == 0:
        stowage.save(model, folder)
    dist.barrier()
    return model


def spread(model: nn.Module, **options: Any) -> nn.Module:
    for layer in (model.up, model.down):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def same(model: Any, whole: nn.Module) -> None:
    """Outputs and bytes."""
    ids = torch.arange(9)
    got, want = model(ids), whole(ids)
    got = got.full_tensor() if hasattr(got, "full_tensor") else got
    assert torch.allclose(got, want, atol=1e-5, rtol=1e-5), (got - want).abs().max()
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    same_parameters(model, whole)
    for name, buffer in whole.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    assert model.head.weight is model.table.weight


def spread_first(mesh: Any, storages: list[Any], root: str) -> None:
    """Without values, and again over values of another model."""
    for i, storage in enumerate(storages):
        folder = f"{root}/{i}"
        whole = packed(folder, storage)
        model = spread(stowage.load(Model, folder, device="meta").eval(), mesh=mesh)
        assert all(p.is_meta for p in model.parameters()) and not model.halves.is_meta
        sharding.load(model, folder)
        sharding.check(model)
        same(model, whole)
        torch.manual_seed(1)
        other = Model().eval()
        if storage is not None:
            stowage.stow(other, rules=rules(storage), skip=None)
        other = spread(other, mesh=mesh)
        mine = dict(other.named_parameters())
        sharding.load(other, folder)
        assert all(mine[n] is p for n, p in other.named_parameters())
        same(other, whole)


def from_a_checkpoint(mesh: Any, storages: list[Any], root: str) -> None:
    """What `save` wrote of a model that was spread, into one without values."""
    for i, storage in enumerate(storages):
        folder = f"{root}/{i}"
        whole = packed(folder, storage)
        sharding.save(spread(copy.deepcopy(whole), mesh=mesh), f"{folder}/checkpoint")
        model = spread(stowage.load(Model, folder, device="meta").eval(), mesh=mesh)
        sharding.load(model, f"{folder}/checkpoint")
        same(model, whole)
        for mode in (torch.device("meta"), torch.inference_mode()):
            model = spread(stowage.load(Model, folder, device="meta").eval(), mesh=mesh)
            with mode:
                sharding.load(model, f"{folder}/checkpoint")
            same(model, whole)


def with_options(mesh: Any, root: str) -> None:
    """What else FSDP2 may be told, and what may be on."""
    whole = packed(root, "nf4")
    for options in (
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        {"reshard_after_forward": False},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float32)},
    ):
        model = spread(stowage.load(Model, root, device="meta").eval(), mesh=mesh, **options)
        sharding.load(model, root)
        same(model, whole)
    for mode in (torch.device("meta"), torch.inference_mode(), torch.autocast("cpu")):
        model = spread(stowage.load(Model, root, device="meta").eval(), mesh=mesh)
        with mode:
            sharding.load(model, root)
        same(model, whole)
    model = spread(stowage.load(Model, root, device="meta").eval(), mesh=mesh)
    model.to_empty(device="cpu")
    model.halves.copy_(torch.arange(64) / 2)
    sharding.load(model, root)
    same(model, whole)


def beside_what_has_values(mesh: Any, root: str) -> None:
    """Adapters that the file does not have, resting weights that have values; and a model that has
    two tensors where the file has one under two names."""
    whole: Any = packed(f"{root}/resting", "nf4")
    model: Any = stowage.load(Model, f"{root}/resting", device="meta").eval()
    model.up.register_parameter("more", nn.Parameter(torch.full((5, 3), 2.0)))
    model.down = copy.deepcopy(whole.down)
    spread(model, mesh=mesh)
    sharding.load(model, f"{root}/resting", strict=False)
    assert torch.equal(model.up.more.full_tensor(), torch.full((5, 3), 2.0))
    same(model, whole)
    whole = packed(f"{root}/plain", None)
    model = stowage.load(Model, f"{root}/plain", device="meta").eval()
    model.head.weight = nn.Parameter(torch.empty(71, 64, device="meta"))
    spread(model, mesh=mesh)
    sharding.load(model, f"{root}/plain")
    assert model.head.weight is not model.table.weight
    assert torch.equal(model.head.weight.full_tensor(), whole.table.weight)
    assert torch.equal(model.table.weight.full_tensor(), whole.table.weight)


def trained_in_fp8(mesh: Any, root: str) -> None:
    """Plain values of a file as master weights whose gathers are fp8."""
    whole = packed(root, None)
    model = stowage.load(Model, root, device="meta").eval()
    convert_float8(model, filter=lambda name, module: name in ("up", "down"))
    spread(model, mesh=mesh)
    sharding.load(model, root)
    state = stowage.state_dict(model)
    for name in ("up.weight", "down.weight", "table.weight"):
        assert torch.equal(state[name], whole.get_parameter(name)), name


def whole_here(root: str) -> None:
    """No processes at all, and a model that is not spread."""
    for storage in (None, "nf4"):
        torch.manual_seed(0)
        whole = Model().eval()
        if storage is not None:
            stowage.stow(whole, rules=rules(storage), skip=None)
        stowage.save(whole, f"{root}/{storage}")
        model = stowage.load(Model, f"{root}/{storage}", device="meta").eval()
        sharding.load(model, f"{root}/{storage}")
        same(model, whole)


def replicated(mesh: Any, root: str) -> None:
    """Pairs that have the same rows."""
    grid = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "rows"))
    for i, storage in enumerate((None, "int8", "nf4")):
        whole = packed(f"{root}/{i}", storage)
        model = spread(stowage.load(Model, f"{root}/{i}", device="meta").eval(), mesh=grid)
        sharding.load(model, f"{root}/{i}")
        same(model, whole)


def parallel(mesh: Any, storages: list[str], root: str, shape: tuple[int, int]) -> None:
    """Tensor parallelism, and FSDP2 on top where there are processes for it."""
    grid = dist.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    for i, storage in enumerate(storages):
        whole = packed(f"{root}/{i}", storage)
        model = stowage.load(Model, f"{root}/{i}", device="meta").eval()
        sharding.prepare(model)
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, grid["tp"], plan)
        if shape[0] > 1:
            spread(model, mesh=grid["dp"])
        for _ in ("into memory that is made", "over values"):
            sharding.load(model, f"{root}/{i}")
            for name in ("up.weight", "down.weight"):
                assert octets(model.get_parameter(name)) == octets(whole.get_parameter(name)), name
        sharding.save(model, f"{root}/{i}/checkpoint")
        model = stowage.load(Model, f"{root}/{i}", device="meta").eval()
        sharding.prepare(model)
        parallelize_module(model, grid["tp"], plan)
        sharding.load(model, f"{root}/{i}/checkpoint")
        for name in ("up.weight", "down.weight"):
            assert octets(model.get_parameter(name)) == octets(whole.get_parameter(name)), name


def quantized_on_the_way(mesh: Any, storages: list[str], root: str) -> None:
    """Plain values of a file come to rest by rows, with the bytes of stow."""
    plain = packed(root, None)
    for storage in storages:
        whole = copy.deepcopy(plain)
        stowage.stow(whole, rules=rules(storage), skip=None)
        model = stowage.load(Model, root, rules=rules(storage), device="meta").eval()
        model = spread(model, mesh=mesh)
        sharding.load(model, root)
        same(model, whole)


def of_each(value: Any) -> list[Any]:
    """That of every process."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


def not_finite_and_kept(mesh: Any, root: str) -> None:
    model, folder = not_finite_in_the_last_rows(mesh, root)
    sharding.load(model, folder, keep_nonfinite=True)
    assert model.up.weight.full_tensor().dequantize()[-1].isnan().any()


def told(mesh: Any, make: Any, *args: Any) -> list[str]:
    """What the load of a model that `make` has made says in each process."""
    model, folder = make(mesh, *args)
    before = {name: p.is_meta for name, p in model.named_parameters()}
    text = "nothing"
    try:
        sharding.load(model, folder)
    except stowage.StowageError as error:
        text = f"{type(error).__name__}: {error}"
    assert {name: p.is_meta for name, p in model.named_parameters()} == before
    return of_each(text)


def of_another_storage(mesh: Any, root: str) -> Any:
    packed(root, "nf4")
    model = Model()
    stowage.stow(model, rules=rules("int8"), skip=None)
    return spread(model, mesh=mesh), root


def without_a_name(mesh: Any, root: str) -> Any:
    packed(root, "nf4")
    model = stowage.load(Model, root, device="meta")
    model.more = nn.Linear(3, 3, device="meta")
    return spread(model, mesh=mesh), root


def of_all_values(mesh: Any, root: str) -> Any:
    packed(root, None)
    model = stowage.load(Model, root, rules=rules("int8:tensor"), device="meta")
    return spread(model, mesh=mesh), root


def not_finite_in_the_last_rows(mesh: Any, root: str) -> Any:
    """Which one process has."""
    torch.manual_seed(0)
    model = Model()
    with torch.no_grad():
        model.up.weight[-1, 3] = torch.nan
    if dist.get_rank() == 0:
        stowage.save(model, root)
    dist.barrier()
    model = stowage.load(Model, root, rules=rules("f8_e4m3"), device="meta")
    return spread(model, mesh=mesh), root


def twice_in_the_file(mesh: Any, root: str) -> Any:
    """Under two names of one tensor of the model, with other values in the last row."""
    model: Any = packed(root, None)
    if dist.get_rank() == 0:
        tensors = load_file(f"{root}/model.safetensors")
        tensors["head.weight"] = tensors["table.weight"].clone()
        tensors["head.weight"][-1] += 1
        save_file(tensors, f"{root}/model.safetensors")
    dist.barrier()
    return spread(copy.deepcopy(model), mesh=mesh), root


def cut_short(mesh: Any, root: str) -> Any:
    packed(root, "nf4")
    model = spread(stowage.load(Model, root, device="meta"), mesh=mesh)
    if dist.get_rank() == 0:
        path = Path(root, "model.safetensors")
        path.write_bytes(path.read_bytes()[:-100])
    dist.barrier()
    return model, root


def bytes_read() -> int:
    """That this process has asked the system for by reads, so far; mapped ones are not counted."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar:")).split()[1])


def read_as_whole(mesh: Any, make: Any, sizes: tuple[Any, ...], file: str, dialect: str) -> None:
    """A model of `make(*sizes)`, each list of whose modules is spread block by block: what is here
    together is what a load of the whole file gives, and is written again."""
    path = Path(file)
    whole = stowage.load(lambda: make(*sizes), path, progress=False)
    model = stowage.load(lambda: make(*sizes), path, device="meta")
    for blocks in [each for each in model.children() for each in (each, *each.children())]:
        for block in blocks if isinstance(blocks, nn.ModuleList) else ():
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sharding.load(model, path)
    sharding.check(model)
    assert same_parameters(model, whole)
    for name, buffer in whole.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    again = path.parent / f"again-{path.stem}"
    stowage.save(model, again, dialect=dialect)
    if mesh.get_rank() == 0:
        files = [path] if path.is_file() else list(path.glob("*.safetensors"))
        for written in files:
            assert (again / written.name).read_bytes() == written.read_bytes()


def causal(family: str, sizes: dict[str, Any]) -> Any:
    import transformers

    config = transformers.AutoConfig.for_model(family, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def shares(mesh: Any, storage: str, root: str) -> tuple[list[int], int]:
    """Bytes that each process has read, and those of the file."""
    torch.manual_seed(0)
    layers = [nn.Linear(1024, 1024, bias=False) for _ in range(4)]
    model = nn.Sequential(*layers)
    stowage.stow(model, storage, skip=None)
    if dist.get_rank() == 0:
        stowage.save(model, root)
    dist.barrier()
    made = stowage.load(lambda: nn.Sequential(*copy.deepcopy(layers)), root, device="meta")
    for layer in made:
        fully_shard(layer, mesh=mesh)
    fully_shard(made, mesh=mesh)
    before = bytes_read()
    sharding.load(made, root)
    return of_each(bytes_read() - before), Path(root, "model.safetensors").stat().st_size

# SPDX-License-Identifier: Apache-2.0
"""Models that are sharded while something stands between torch and its operators: what one rank has
of each weight, and what the model computes, are those without."""

import contextlib
import cProfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from float8_ranks import plain
from modes import Below, Passing, default_device, deterministic
from parallel import Mlp, mesh_of, spread
from sharded import flat_bytes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.flop_counter import FlopCounterMode

import stowage
from stowage import sharding
from stowage.sharding import StowedRows
from stowage.training import convert_float8

STORAGES = ("nf4", "nf4:nested", "nf4:torchao:block64:scaler4", "f8_e4m3:row", "f8_e4m3", "int8")
SIZES = (64, 40, 32)


# --- what may stand between -----------------------------------------------------------------------


class Bare(Passing):
    """One that hides torch functions from subclasses."""

    def _pass(self, func: Any, args: Any, kwargs: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


@contextlib.contextmanager
def _all(*entered: Callable[[], Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for enter in entered:
            stack.enter_context(enter())
        yield


MODES: dict[str, Callable[[], Any]] = {
    "set_default_device": lambda: default_device("cpu"),
    "set_default_device meta": lambda: default_device("meta"),
    "with torch.device": lambda: torch.device("cpu"),
    "function mode": Passing,
    "function mode twice": lambda: _all(Passing, Passing),
    "bare function mode": Bare,
    "dispatch mode": Below,
    "dispatch mode twice": lambda: _all(Below, Below),
    "counting communication": CommDebugMode,
    "counting products": lambda: FlopCounterMode(display=False),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": deterministic,
    "no_grad": torch.no_grad,
    # Not with_stack=True: docs/decisions.md, "torch's profiler with stacks".
    "profiler": torch.profiler.profile,
    "Python's profiler": cProfile.Profile,
    "several": lambda: _all(Passing, Below, lambda: default_device("cpu"), deterministic),
}
# FSDP2 and DTensor themselves fail where a weight has no version or no memory.
FSDP_ONLY = {"inference_mode": torch.inference_mode}


# --- what is sharded ------------------------------------------------------------------------------


def _rests(storage: str) -> Any:
    torch.manual_seed(0)
    model = Mlp(SIZES).requires_grad_(False)
    stowage.stow(model, rules={"*.weight": storage})
    return model


def _facts(tensor: Any) -> Any:
    """All that this rank has of a weight, and the flat bytes of the whole."""
    local = tensor._local_tensor
    if not isinstance(local, StowedRows):
        return type(local).__name__, flat_bytes(tensor)
    shared = [bytes(t.reshape(-1).view(torch.uint8).tolist()) for t in local._shared()]
    place = (local.first, local._whole, tuple(local.shape), tensor.placements)
    return local.records.tolist(), shared, place, flat_bytes(tensor)


def _weights(model: Any) -> list[Any]:
    return [_facts(model.up.weight), _facts(model.down.weight)]


def fsdp(storage: str, mode: Callable[[], Any], shape: tuple[int, int]) -> Any:
    model, mesh = _rests(storage), init_device_mesh("cpu", (shape[0] * shape[1],))
    with mode():
        for layer in (model.up, model.down):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    sharding.check(model)
    x = torch.linspace(-1, 1, 3 * SIZES[0]).view(3, -1)
    with torch.no_grad():
        return model(x), _weights(model)


def _plan_of(storage: str) -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    columns = {"up": ColwiseParallel(output_layouts=Replicate()), "down": ColwiseParallel()}
    by_groups = "nested" in storage or "torchao" in storage
    blocks = stowage.quantize(torch.ones(8, 64), storage)._storage.flat
    return columns if by_groups or blocks else {"up": ColwiseParallel(), "down": RowwiseParallel()}


def parallelized(storage: str, mode: Callable[[], Any], shape: tuple[int, int]) -> Any:
    model, mesh = _rests(storage), mesh_of(shape)
    with mode():
        spread(model, mesh, False, _plan_of(storage))
    x = torch.linspace(-1, 1, 3 * SIZES[0]).view(3, -1)
    with torch.no_grad():
        return plain(model(x)), _weights(model)


def distributed(storage: str, mode: Callable[[], Any], shape: tuple[int, int]) -> Any:
    mesh, found = mesh_of(shape)["tp"], []
    for placement in (Shard(0), Replicate()):
        for source in (0, None):
            weight = sharding.prepare(_rests(storage).up.weight)
            with mode():
                spread_weight = distribute_tensor(weight, mesh, [placement], src_data_rank=source)
            found.append(_facts(spread_weight))
    return torch.zeros(()), found


def float8(storage: str, mode: Callable[[], Any], shape: tuple[int, int]) -> Any:
    """Of a recipe in place of a storage: tensor parallelism computes in fp8."""
    torch.manual_seed(0)
    model = convert_float8(Mlp(), storage)
    with mode():
        spread(model, mesh_of(shape), False)
    assert "forward" in model.up.__dict__ and "forward" in model.down.__dict__
    x = torch.linspace(-1, 1, 3 * 64).view(3, -1)
    y: Any = model(x)
    y.sum().backward()
    return plain(y), [plain(p.grad).tolist() for p in model.parameters()]


WAYS = {"fsdp": fsdp, "parallelized": parallelized, "distributed": distributed, "float8": float8}


def differences(cases: list[tuple[str, str, str]], shape: tuple[int, int]) -> list[str]:
    """For each (way, storage, mode) what is not as it is without a mode."""
    wrong: list[str] = []
    usual: dict[tuple[str, str], Any] = {}
    for way, storage, name in cases:
        call = WAYS[way]
        if (way, storage) not in usual:
            usual[way, storage] = call(storage, contextlib.nullcontext, shape)
        mode = {**MODES, **FSDP_ONLY}[name]
        want, got = usual[way, storage], call(storage, mode, shape)
        if not torch.equal(want[0], got[0]):
            wrong.append(f"{way}, {storage}, {name}: outputs")
        if want[1] != got[1]:
            wrong.append(f"{way}, {storage}, {name}: weights")
    return wrong


def replicas(name: str) -> str:
    """What DataParallel's copies of a resting weight say under a mode."""
    model = nn.Sequential(nn.Linear(8, 8))
    stowage.stow(model, "int8")
    try:
        with MODES[name](), copied_in_cpp():
            nn.parallel.replicate(model, [0], detach=True)
    except stowage.Unsupported as error:
        return str(error)
    return "copied"


@contextlib.contextmanager
def copied_in_cpp() -> Iterator[None]:
    """As torch copies parameters to devices where it has some: dense, and below every hook."""
    had = hasattr(torch._C, "_broadcast_coalesced")
    usual = getattr(torch._C, "_broadcast_coalesced", None)

    def copy(tensors: Any, devices: Any, size: int) -> list[list[Any]]:
        return [[torch.empty(t.shape) for t in tensors] for _ in devices]

    torch._C._broadcast_coalesced = copy  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if had:
            torch._C._broadcast_coalesced = usual  # type: ignore[attr-defined]
        else:
            del torch._C._broadcast_coalesced  # type: ignore[attr-defined]


def kept_values(names: list[str]) -> None:
    """Init values of weights that are sharded under a mode, and initialised after it."""
    from kept_ranks import values_of

    for name in names:
        with MODES[name]():
            values_of([("f8_e4m3:tensor", True), ("nf4:nested", False)])


def along_columns(name: str) -> str:
    """What FSDP2 is told that would cut columns, under a mode."""
    model, mesh = _rests("nf4"), init_device_mesh("cpu", (2,))
    try:
        with MODES[name]():
            fully_shard(model.up, mesh=mesh, shard_placement_fn=lambda _: Shard(1))
    except stowage.Unsupported as error:
        assert type(model.up.weight) is stowage.StowedTensor
        return str(error)
    return "sharded"


def not_prepared(storage: str) -> list[str]:
    """What tensor parallelism gets to hear whose weights nobody prepared: the text of each way."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh, texts = mesh_of((1, 2))["tp"], []
    for style in (ColwiseParallel(), RowwiseParallel()):
        for source in (0, None):
            model = _rests(storage)
            weight = model.up.weight
            try:
                parallelize_module(model, mesh, {"up": style}, src_data_rank=source)
                texts.append("parallelized")
            except stowage.Unsupported as error:
                assert model.up.weight is weight
                texts.append(str(error))
    for placement in (Shard(0), Replicate()):
        try:
            distribute_tensor(_rests(storage).up.weight, mesh, [placement])
            texts.append("distributed")
        except stowage.Unsupported as error:
            texts.append(str(error))
    return texts


def widened_on_one(folder: str) -> list[str]:
    """What `check` and `save` say on each rank where the second alone has plain values."""
    mesh, model, texts = init_device_mesh("cpu", (2,)), _rests("nf4"), []
    if dist.get_rank():
        stowage.unstow(model)
        model.up._stowage_rested = {"weight": "nf4:block64"}
    fully_shard(model, mesh=mesh)
    for call in (sharding.check, lambda m: sharding.save(m, folder)):
        try:
            call(model)
        except stowage.InvalidArgument as error:
            texts.append(str(error))
    return texts

# SPDX-License-Identifier: Apache-2.0
"""Training with masters. The oracle: plain masters that are quantized in every forward."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import stowage
from stowage.training import MasterOptimizer, from_masters, init_value, quantized_init


class Mlp(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 33, dtype=dtype), nn.Linear(33, 9, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class _Quantized(torch.autograd.Function):
    """The values of a weight that rests, with the gradient of the plain one."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, storage: str, via: torch.dtype | None) -> Tensor:
        seen = weight.detach() if via is None else weight.detach().to(via)
        return stowage.quantize(seen, storage).dequantize(weight.dtype if via is None else via)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        return g.float(), None, None


class Oracle(nn.Module):
    """fp32 masters, each of which is cast (`via`) and quantized in every forward."""

    def __init__(self, storage: str, dtype: torch.dtype, via: torch.dtype | None) -> None:
        super().__init__()
        model = Mlp(dtype)
        self.storage, self.via, self.dtype = storage, via, dtype
        for name in ("up", "down"):
            layer = getattr(model, name)
            layer.weight = nn.Parameter(layer.weight.detach().float())
            setattr(self, name, layer)

    def _layer(self, layer: nn.Linear, x: Tensor) -> Tensor:
        weight = _Quantized.apply(layer.weight, self.storage, self.via)  # type: ignore[no-untyped-call]
        return F.linear(x, weight, layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self._layer(self.down, torch.tanh(self._layer(self.up, x)))


def batches(dtype: torch.dtype, steps: int) -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(11)
    inputs = [torch.randn(16, 24, generator=made) for _ in range(steps)]
    return [(x.to(dtype), x[:, :9].sin().to(dtype)) for x in inputs]


def losses(
    model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype, steps: int
) -> list[float]:
    found = []
    for x, y in batches(dtype, steps):
        loss = F.mse_loss(model(x).float(), y.float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def resting(storage: str, dtype: torch.dtype = torch.float32, **options: Any) -> Mlp:
    torch.manual_seed(2)
    with quantized_init(storage, exact=True, **{"preserve_init": True, **options}):
        return Mlp(dtype)


def oracle(storage: str, dtype: torch.dtype, via: torch.dtype | None) -> Oracle:
    torch.manual_seed(2)
    return Oracle(storage, dtype, via)


def optimizer_of(model: nn.Module, **options: Any) -> MasterOptimizer:
    return MasterOptimizer(torch.optim.AdamW, model, lr=2e-3, foreach=False, **options)


# --- on ranks -------------------------------------------------------------------------------------


def _bytes(model: nn.Module) -> list[Tensor]:
    found = []
    for p in model.parameters():
        whole = p.full_tensor() if hasattr(p, "full_tensor") else p
        found += list(whole.parts.values()) if hasattr(whole, "parts") else [whole.detach()]
    return found


def sharded_equals_whole(cases: list[tuple[str, str]], steps: int) -> int:
    """Losses and bytes of a sharded run are those of one that is not, for the same batches."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for storage, rounding in cases:
        whole = resting(storage)
        want = losses(whole, optimizer_of(whole, rounding=rounding), torch.float32, steps)
        model = resting(storage)
        fully_shard(model, mesh=mesh)
        model.set_force_sum_reduction_for_comms(True)
        optimizer = optimizer_of(model, rounding=rounding)
        assert set(optimizer.sources.values()) == {"kept"}
        kept = init_value(model.up.weight)
        assert optimizer.masters["up.weight"]._local_tensor.data_ptr() == kept.data_ptr()
        assert losses(model, optimizer, torch.float32, steps) == want, (storage, rounding)
        for a, b in zip(_bytes(whole), _bytes(model), strict=True):
            assert torch.equal(a, b), (storage, rounding)
    return len(cases)


def parts_of_flat_weights(storages: list[str]) -> int:
    """Every rank updates one flat part of each weight; together they are the whole cast."""
    rank, world = dist.get_rank(), dist.get_world_size()
    calls = 0
    reduce = dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return reduce(*args, **kwargs)

    weights, masters, offsets, wanted = [], [], [], []
    for i, storage in enumerate(storages):
        torch.manual_seed(i)
        shape = (2, 3, 64) if "row2" in storage else (5, 64)
        master = torch.randn(shape) * (1 + torch.arange(64))
        weights.append(stowage.quantize(torch.zeros(shape), storage))
        wanted.append(stowage.quantize(master, storage))
        cut = [0, 102, master.numel()] if i % 2 else [0, master.numel(), master.numel()]
        start, stop = (cut[rank], cut[rank + 1]) if world == 2 else (0, master.numel())
        empty = start == stop
        masters.append(None if empty else master.view(-1)[start:stop])
        offsets.append(None if empty else start)
    dist.all_reduce = counted
    try:
        from_masters(weights, masters, offsets, dist.group.WORLD)
    finally:
        dist.all_reduce = reduce
    for weight, want, master, start in zip(weights, wanted, masters, offsets, strict=True):
        codes, *scales = weight.parts.values()
        right, *others = want.parts.values()
        assert all(torch.equal(a, b) for a, b in zip(scales, others, strict=True)), weight
        if master is None or start is None:
            continue
        per = 2 if codes.numel() * 2 == weight.numel() else 1
        span = slice(start // per, (start + master.numel()) // per)
        assert torch.equal(codes.view(-1)[span], right.view(-1)[span]), weight
    return calls


def refused_alike() -> str:
    """A master that is not finite on one rank."""
    weight = stowage.quantize(torch.ones(4, 8), "int8:tensor")
    before = weight.dequantize()
    half = torch.ones(16)
    if dist.get_rank() == 1:
        half[3] = float("nan")
    try:
        from_masters({"w": weight}, {"w": half}, [16 * dist.get_rank()], dist.group.WORLD)
    except ValueError as error:
        assert torch.equal(weight.dequantize(), before)
        return str(error)
    return "no error"


def recipe(code: str, folder: str) -> list[float]:
    """Runs a recipe in `folder`, in a process group that is there already: its last two losses."""
    os.chdir(folder)
    names: dict[str, Any] = {}
    exec(code.replace('dist.init_process_group("gloo")\n', ""), names)
    assert {value.state for value in names["init_values"](names["model"])} == {"cleared"}
    assert {value.state for value in names["init_values"](names["again"])} != {"kept"}
    return [names["first"], names["second"]]


# --- surroundings, on ranks -----------------------------------------------------------------------


def _sharded(storage: str) -> tuple[Any, MasterOptimizer]:
    model: Any = resting(storage)
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    model.set_force_sum_reduction_for_comms(True)
    return model, optimizer_of(model)


def _scaled_steps(model: Any, optimizer: Any, steps: range, infinite: bool) -> list[Any]:
    """Losses, scales and norms of steps in a scaler; in step 1 a gradient is infinite, on the last
    rank of a sharded model."""
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)
    found = []
    given = batches(torch.float32, steps.stop)
    for at in steps:
        x, y = given[at]
        loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        grad = model.up.weight.grad
        if infinite and at == 1:
            local = getattr(grad, "_local_tensor", grad)
            if local is grad or dist.get_rank() == dist.get_world_size() - 1:
                local[-1, -1] = torch.inf
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append((loss.item(), scaler.get_scale()))
    return found


def _whole_masters(optimizer: MasterOptimizer) -> list[Tensor]:
    return [getattr(m, "full_tensor", lambda m=m: m)() for m in optimizer.masters.values()]


def scaled_on_ranks(storage: str) -> str:
    plain = oracle(storage, torch.float32, None)
    torch_own = torch.optim.AdamW(plain.parameters(), lr=2e-3, foreach=False)
    want = _scaled_steps(plain, torch_own, range(5), True)
    model, optimizer = _sharded(storage)
    got = _scaled_steps(model, optimizer, range(5), True)
    assert got == want, (got, want)
    weights = [plain.up.weight, plain.down.weight]
    for a, b in zip(_whole_masters(optimizer), weights, strict=True):
        assert torch.equal(a, b)
    return "alike"


def checkpoints_by_name_on_ranks(storage: str, folder: str) -> str:
    """A stopped run resumes with the losses of one that was not: in memory, gathered to whole
    tensors and back, and through files of torch.distributed.checkpoint."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as named

    def train(model: Any, optimizer: Any) -> list[Any]:
        return [*_scaled_steps(model, optimizer, range(2, 5), False), *_whole_masters(optimizer)]

    model, optimizer = _sharded(storage)
    _scaled_steps(model, optimizer, range(2), False)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    saved = []
    for options in ({}, {"flatten_optimizer_state_dict": True}, {"full_state_dict": True}):
        given = named.StateDictOptions(**options)  # type: ignore[arg-type]
        state = named.get_optimizer_state_dict(model, optimizer, options=given)
        saved.append((given, copy.deepcopy(state)))
    dcp.save(saved[1][1], checkpoint_id=folder)
    want = train(model, optimizer)
    for given, state in [*saved, (saved[1][0], None)]:
        again, resumed = _sharded(storage)
        if state is None:
            state = named.get_optimizer_state_dict(again, resumed, options=given)
            dcp.load(state, checkpoint_id=folder)
        named.set_optimizer_state_dict(again, resumed, state, options=given)
        again.load_state_dict(weights)
        got = train(again, resumed)
        assert got[:3] == want[:3], (given, got[:3], want[:3])
        assert all(torch.equal(a, b) for a, b in zip(got[3:], want[3:], strict=True)), given
    return "alike"

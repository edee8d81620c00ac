# SPDX-License-Identifier: Apache-2.0
"""What single ranks do in the tests of fp8 training under FSDP2."""

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from stowage.training import convert_float8, refresh_scales
from stowage.training.trained_weight import TrainedWeight


class Net(nn.Module):
    """Linear layers whose rows no number of ranks divides; the last has a single one."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        sizes = (32, 7, 5, 3, 1)
        self.layers = nn.ModuleList(map(nn.Linear, sizes[:-1], sizes[1:]))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
            x = torch.tanh(x)
        return x


class Counts:
    """Collectives, and the bytes that this rank sends and receives in gathers."""

    def __init__(self) -> None:
        self.reductions: list[int] = []
        self.gathered: list[tuple[torch.dtype, int]] = []


@contextmanager
def counting() -> Iterator[Counts]:
    counts, old = Counts(), {n: getattr(dist, n) for n in ("all_reduce", GATHER)}

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        counts.reductions.append(tensor.nbytes)
        return old["all_reduce"](tensor, *args, **kwargs)

    def gather(*args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        counts.gathered.append((tensors[0].dtype, max(t.nbytes for t in tensors)))
        return old[GATHER](*args, **kwargs)

    dist.all_reduce = all_reduce
    setattr(dist, GATHER, gather)
    try:
        yield counts
    finally:
        dist.all_reduce = old["all_reduce"]
        setattr(dist, GATHER, old[GATHER])


GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers if isinstance(model, Net) else ():
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def plain(x: Any) -> Tensor:
    full = x.full_tensor() if hasattr(x, "full_tensor") else x
    return (full._value if isinstance(full, TrainedWeight) else full).detach()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: plain(value).clone() for name, value in model.state_dict().items()}


def differences(a: nn.Module, b: nn.Module) -> list[str]:
    pairs = zip(a.named_parameters(), b.named_parameters(), strict=True)
    return [name for (name, x), (_, y) in pairs if not torch.equal(plain(x), plain(y))]


def parity(recipe: str, steps: int, options: dict[str, Any], extra: dict[str, Any]) -> list[str]:
    """Trains sharded and unsharded on the same batches; what differs."""
    torch.manual_seed(0)
    convert = extra.get("convert", {})
    whole = convert_float8(Net(extra.get("checkpointed", False)), recipe, **convert)
    parts = sharded(copy.deepcopy(whole), **options)
    pair = (whole, parts)
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2, foreach=False) for m in pair]
    micro, wrong = extra.get("micro", 1), []
    for step in range(steps):
        losses = []
        batches = torch.randn(micro, 8, 32)
        for model, optimizer in zip(pair, optimizers, strict=True):
            for i, batch in enumerate(batches):
                if model is parts and micro > 1:
                    parts.set_requires_gradient_sync(i + 1 == micro)
                    parts.set_reshard_after_backward(i + 1 == micro)
                loss = model(batch).square().mean()
                loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            if extra.get("refresh", True):
                refresh_scales(model)
        if losses[0] != losses[1]:
            wrong.append(f"step {step}: {losses}")
    return wrong + differences(whole, parts)


def matrix(cases: list[Any]) -> list[str]:
    """parity() of many cases in one process group."""
    return [f"{case}: {wrong}" for case in cases if (wrong := parity(*case))]


def gathered_bytes(rows: int, columns: int, recipe: str) -> tuple[bool, bool, Any, Any]:
    """Whether codes and factor are those of the whole weight; the gathers and reductions."""
    torch.manual_seed(rows)
    whole = convert_float8(nn.Sequential(nn.Linear(columns, rows, bias=False)), recipe)
    parts = sharded(copy.deepcopy(whole))
    with counting() as counts:
        parts(torch.zeros(1, columns))
        parts.reshard()
        counts.gathered.clear()
        parts.unshard()
    cast, expected = parts[0].weight.cast(), whole[0].weight.cast()
    same = torch.equal(cast.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    factor = torch.equal(cast.factor, expected.factor)
    return same, factor, counts.gathered, counts.reductions


def all_bytes() -> list[Any]:
    both = itertools.product(("tensorwise", "rowwise"), (1, 3, 5, 7, 8))
    return [(recipe, n, *gathered_bytes(n, 33, recipe)) for recipe, n in both]


def stale(change: str) -> tuple[list[int], bool]:
    """Writes to the weights, uses them without a refresh: the reductions, and if it is right."""
    torch.manual_seed(0)
    whole = convert_float8(Net(), "tensorwise")
    parts = sharded(copy.deepcopy(whole))
    x = torch.randn(4, 32)
    for model in (whole, parts):
        model(x).sum().backward()
    with counting() as counts:
        for model in (whole, parts):
            parameters = list(model.parameters())
            if change == "data":
                for parameter in parameters:
                    parameter.data.mul_(3)
            elif change == "compiled":
                step = torch.optim.AdamW(parameters, 0.1).step
                torch.compile(step, backend="aot_eager")()
                if model is parts:
                    whole.load_state_dict(values(parts))
            elif change == "foreach":
                with torch.no_grad():
                    torch._foreach_mul_(parameters, 3)
            else:
                torch.optim.AdamW(parameters, 0.1, fused=True).step()
        same = torch.equal(parts(x), whole(x))
    return counts.reductions, same


def offloaded() -> tuple[list[int], list[str]]:
    policy = CPUOffloadPolicy(pin_memory=False)
    with counting() as counts:
        wrong = parity("tensorwise", 3, {"offload_policy": policy}, {})
    return counts.reductions, wrong


def refusal(recipe: str, bad: float) -> str:
    """One rank's shard gets a value that is not finite; what this rank is told."""
    torch.manual_seed(0)
    model = sharded(convert_float8(Net(), recipe))
    if dist.get_rank() == dist.get_world_size() - 1:
        model.layers[0].weight._local_tensor.data[0, 1] = bad
    elif recipe == "tensorwise":
        model.layers[0].weight._local_tensor.data.mul_(1)
    try:
        model(torch.zeros(2, 32))
    except ValueError as error:
        return str(error)
    return ""


def mixed() -> tuple[torch.dtype, torch.dtype, list[tuple[torch.dtype, int]]]:
    """Of a bf16 policy: the dtypes of the result and of a gradient, and what was gathered."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(convert_float8(Net(), "tensorwise"), mp_policy=policy)
    with counting() as counts:
        result = model(torch.randn(4, 32))
    result.sum().backward()
    return result.dtype, model.layers[0].weight.grad.dtype, counts.gathered

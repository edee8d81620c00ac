# SPDX-License-Identifier: Apache-2.0
"""What single ranks do in the tests of resting weights under tensor parallelism and FSDP2."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from parallel import Mlp, mesh_of, spread, text_of
from sharded import flat_bytes
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel

import stowage
from stowage import sharding
from stowage.training import from_masters

_numbers = itertools.count()
COLUMNS = {"up": ColwiseParallel(output_layouts=Replicate())}  # `down` is left alone


class Adapted(Mlp):
    """With an adapter beside, plain on every rank."""

    def __init__(self, sizes: tuple[int, int, int]) -> None:
        super().__init__(sizes)
        self.a = nn.Linear(sizes[0], 4, bias=False)
        self.b = nn.Linear(4, sizes[2], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x) + self.b(self.a(x))
        return y


def rests(storage: str, sizes: tuple[int, int, int], plan: Any = None, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = Adapted(sizes)
    names = tuple(plan or ("up", "down"))
    for name in names:
        model.get_submodule(name).weight.requires_grad_(False)
    stowage.stow(model, rules={f"{name}.weight": storage for name in names})
    return model


def bytes_of(model: Any) -> list[list[bytes]]:
    weights = [layer.weight for layer in (model.up, model.down)]
    return [flat_bytes(weight) for weight in weights if not weight.requires_grad]


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {n: t.clone() for n, t in stowage.state_dict(model).items()}


def steps(
    storage: str, shape: tuple[int, int], fsdp: bool, sizes: Any, plan: Any, folder: str
) -> list[str]:
    """Forward and backward passes beside the whole model, flat bytes before and after, a
    checkpoint; what is not right."""
    mesh, wrong = mesh_of(shape), []
    whole = rests(storage, sizes, plan)
    parts = spread(rests(storage, sizes, plan), mesh, fsdp, plan)
    before = bytes_of(whole)
    if bytes_of(parts) != before:
        wrong.append("bytes before")
    stowage.fallbacks(clear=True)
    x = torch.randn(8, sizes[0])
    optimizers = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 0.1) for m in (whole, parts)
    ]
    for step in range(2):
        losses = []
        for model, optimizer in zip((whole, parts), optimizers, strict=True):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if abs(losses[0] - losses[1]) > 1e-6 * losses[0]:
            wrong.append(f"losses {step}: {losses}")
    if stowage.fallbacks():
        wrong.append(f"{stowage.fallbacks()}")
    if bytes_of(parts) != before:
        wrong.append("bytes after")
    wrong += checkpoint(parts, storage, sizes, plan, folder)
    return [f"{storage} {shape} {fsdp}: {text}" for text in wrong]


def checkpoint(parts: Any, storage: str, sizes: Any, plan: Any, folder: str) -> list[str]:
    """Saved as it is spread, loaded as other meshes and one process have it."""
    place = f"{folder}/{next(_numbers)}"
    want, wrong, world = values_of(parts), [], dist.get_world_size()
    sharding.check(parts)
    sharding.save(parts, place)
    for shape in ((world, 1), (1, world) if plan is None else (world, 1), None):
        other = rests(storage, sizes, plan, seed=1)
        if shape is not None:
            spread(other, mesh_of(shape), True, plan)
        sharding.load(other, place)
        got = values_of(other)
        wrong += [f"{shape}: {n}" for n in want if not torch.equal(want[n], got[n])]
    return wrong


def all_steps(cases: Sequence[tuple[Any, ...]], folder: str) -> list[str]:
    return [text for case in cases for text in steps(*case, folder)]


def refusals() -> list[str]:
    """Where blocks do not let a piece be a weight: the text, the same on every rank."""
    mesh = mesh_of((2, 2))
    texts = []
    for storage, sizes, plan in (
        ("nf4", (64, 96, 16), None),  # 48 columns for each rank
        ("nf4:nested", (64, 128, 16), None),  # columns
        ("nf4", (33, 6, 16), COLUMNS),  # from element 99 on
        ("nf4:nested", (64, 128, 16), COLUMNS),  # from block 64 on
    ):
        model = rests(storage, sizes, plan)
        texts.append(text_of(lambda m=model, p=plan: spread(m, mesh, True, p)))
    cut: Any = spread(rests("f8_e4m3:row", (64, 64, 16)), mesh, True)
    master = torch.zeros(cut.down.weight.to_local().shape)
    texts.append(text_of(lambda: from_masters([cut.down.weight], [master])))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, [text.split(", for ")[0] for text in texts])
    assert all(each[:2] == every[0][:2] for each in every), every
    return texts


def unaligned() -> bool:
    """Tensor parallelism alone decodes rows that no block begins: right, and counted."""
    whole = rests("nf4", (33, 6, 16), COLUMNS)
    parts = spread(rests("nf4", (33, 6, 16), COLUMNS), mesh_of((2, 2)), False, COLUMNS)
    stowage.fallbacks(clear=True)
    x = torch.randn(8, 33)
    same = torch.allclose(parts(x), whole(x), rtol=1e-6, atol=1e-6)
    begins = not dist.get_rank() % 2  # with a block: its rows are a weight of their own
    counted = bool(stowage.fallbacks(clear=True)) != begins
    return (bytes_of(parts) == bytes_of(whole)) and same and counted


def everything(cases: Sequence[tuple[Any, ...]], folder: str) -> tuple[list[str], list[str], bool]:
    """All of a test in one start of four processes."""
    return all_steps(cases, folder), refusals(), unaligned()

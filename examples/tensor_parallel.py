# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism and FSDP2 on the same weights: four gloo processes, a mesh of 2x2.

Each process holds a quarter of every weight. First a frozen NF4 model with an adapter beside, then
fp8 training; both also run whole, in each process, and the differences are printed.

Run: python examples/tensor_parallel.py
"""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import stowage
from stowage import sharding
from stowage.training import convert_float8, refresh_scales

RANKS = 4
PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Block(nn.Module):
    def __init__(self, width: int = 256, hidden: int = 512) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.a, self.b = nn.Linear(width, 8, bias=False), nn.Linear(8, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(x))) + self.b(self.a(x))
        return y


def frozen_nf4(model: Block) -> None:
    for layer in (model.up, model.down):
        layer.requires_grad_(False)
    stowage.stow(model, rules={"up.weight": "nf4", "down.weight": "nf4"})


def fp8(model: Block) -> None:
    convert_float8(model, "tensorwise", filter=lambda name, module: name in PLAN)


def train(model: Any, steps: int = 3) -> list[float]:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(16, 256)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        refresh_scales(model)  # one reduction for all scales; nothing to do for frozen weights
        losses.append(loss.item())
    return losses


def process(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for change in (frozen_nf4, fp8):
        torch.manual_seed(0)
        whole = Block()
        change(whole)
        model = copy.deepcopy(whole)
        sharding.prepare(model)  # so that they rest
        parallelize_module(model, mesh["tp"], PLAN)  # pieces over tp
        fully_shard(model, mesh=mesh["dp"])  # and the pieces over dp
        here, everywhere = model.up.weight.to_local(), whole.up.weight
        share = getattr(here, "nbytes_at_rest", here.nbytes)
        total = getattr(everywhere, "nbytes_at_rest", everywhere.nbytes)
        losses = zip(train(whole), train(model), strict=True)
        apart = max(abs(a - b) / a for a, b in losses)
        if rank == 0:
            print(f"{change.__name__}: {share} of {total} bytes of up.weight on each rank, "
                  f"losses within {apart:.0e} of the whole model")  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        # fork: nothing has run yet, and the imports above are shared
        multiprocessing.start_processes(process, (f"{folder}/store",), RANKS, start_method="fork")

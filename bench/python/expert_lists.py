# SPDX-License-Identifier: Apache-2.0
"""Experts that are modules of a list, within a part of their memory: by what the router picks, and
by the order of the pass before, as where nobody says how many experts a token takes.

Layers of random weights whose routers prefer some experts; a token at a time. Run:
python bench/python/expert_lists.py [--layers 4] [--experts 64] [--taken 4] [--width 1024]
     [--storage int8:row] [--part 0.25] [--tokens 200] [--folder FOLDER] [--json]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stowage

WAYS = ("order of the pass before", "what the router picks")


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(width, width, bias=False)
        self.down_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.up_proj(x)))
        return out


class Block(nn.Module):
    def __init__(self, experts: int, taken: int, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        with torch.no_grad():  # some are picked more often
            self.gate.weight.mul_(torch.linspace(2.5, 0.2, experts)[:, None])
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))
        self._taken = taken

    def forward(self, x: Tensor) -> Tensor:
        weights, picked = self.gate(x).softmax(-1).topk(self._taken)
        out = torch.zeros_like(x)
        for expert in picked.unique().tolist():
            row, place = torch.where(picked == expert)
            out.index_add_(0, row, self.experts[expert](x[row]) * weights[row, place, None])
        return x + out


def build(options: argparse.Namespace, says: bool) -> nn.Module:
    torch.manual_seed(0)
    made = (Block(options.experts, options.taken, options.width) for _ in range(options.layers))
    model = nn.Sequential(*made).bfloat16().eval().requires_grad_(False)
    for block in model:
        if says:
            block.top_k = options.taken
    return model


def measured(options: argparse.Namespace, folder: Path, way: str) -> dict[str, float]:
    """Of a token, when as many went before."""
    whole = stowage.nbytes(stowage.load(lambda: build(options, True), folder, device="meta"))
    model = stowage.load(
        partial(build, options, way == WAYS[1]),
        folder,
        ram=int(whole * options.part),
        reads="direct",
    )
    draw = torch.Generator().manual_seed(1)
    every = torch.randn(2 * options.tokens, 1, options.width, generator=draw).bfloat16()
    for x in every[: options.tokens]:
        model(x)
    before, begun = stowage.engine_report(model), time.perf_counter()
    for x in every[options.tokens :]:
        model(x)
    seconds = time.perf_counter() - begun
    spent = stowage.engine_report(model).since(before)
    return {
        "ms": seconds / options.tokens * 1e3,
        "MB read": spent.bytes_read / options.tokens / 1e6,
        "ms waited": spent.stall / options.tokens * 1e3,
        "in vain": spent.unused / max(spent.ahead, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--taken", type=int, default=4)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--storage", default="int8:row")
    parser.add_argument("--part", type=float, default=0.25, help="of the model's bytes, in memory")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--folder", help="where the model is written; a disk, not a tmpfs")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        model = build(options, True)
        stowage.stow(model, options.storage, measure=False)
        stowage.save(model, folder)
        del model
        found = {way: measured(options, Path(folder), way) for way in WAYS}
    if options.json:
        print(json.dumps(found))
        return
    for way, row in found.items():
        print(f"{way:26}", *(f"{name} {value:.3g}" for name, value in row.items()), sep="  ")


if __name__ == "__main__":
    main()

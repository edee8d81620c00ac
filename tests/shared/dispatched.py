# SPDX-License-Identifier: Apache-2.0
"""Models for the tests of the facade: one by hand, and any number by seed."""

from __future__ import annotations

import random

import torch
from torch import nn


class Block(nn.Module):
    """Children, and tensors of its own beside them."""

    def __init__(self, width: int, own: bool = False, buffer: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        if own:
            self.scale = nn.Parameter(torch.ones(width))
        if buffer:
            self.register_buffer("mask", torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(self.first(x).relu())
        y = y * self.scale if hasattr(self, "scale") else y
        return x + (y * self.mask if hasattr(self, "mask") else y)


class Small(nn.Module):
    """Three layers: 64, 72 and 100 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear1, self.norm, self.linear2 = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear2(self.norm(self.linear1(x)))


class Rooted(nn.Module):
    """A parameter of the root, a buffer that is saved, one that is not, and a tie."""

    def __init__(self, width: int = 160) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width))
        self.embed = nn.Embedding(50, width)
        self.blocks = nn.Sequential(Block(width, own=True), Block(width, buffer=True))
        self.head = nn.Linear(width, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.rand(width))
        self.register_buffer("phase", torch.rand(width), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * self.scale + self.shift + self.phase
        return self.head(self.blocks(x))


def random_model(seed: int, ties: int = 0, direct_buffers: bool = False) -> nn.Module:
    """A tree of sequences, blocks and layers."""
    rng = random.Random(seed)
    torch.manual_seed(seed)

    def part(depth: int) -> nn.Module:
        width = rng.choice([2, 4, 8])
        kind = rng.randrange(6) if depth else rng.randrange(4)
        if kind == 0:
            return nn.Linear(width, rng.choice([2, 4, 8]), bias=rng.random() < 0.7)
        if kind == 1:
            return nn.BatchNorm1d(width)
        if kind == 2:
            return nn.ReLU()
        if kind == 3:
            own, buffer = rng.random() < 0.5, direct_buffers and rng.random() < 0.5
            return Block(width, own, buffer)
        return nn.Sequential(*[part(depth - 1) for _ in range(rng.randint(1, 4))])

    model = nn.Sequential(*[part(2) for _ in range(rng.randint(1, 6))])
    if rng.random() < 0.3:
        model.register_parameter("root", nn.Parameter(torch.rand(rng.choice([2, 9]))))
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    for _ in range(ties):
        one, other = rng.choice(layers or [None]), rng.choice(layers or [None])
        if one is not other and one.weight.shape == other.weight.shape:
            other.weight = one.weight
    return model

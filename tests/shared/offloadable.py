# SPDX-License-Identifier: Apache-2.0
"""A small model whose weights can go to the disk, for the tests of what other packages do wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import stowage

X = torch.linspace(-1, 1, 3 * 160).reshape(3, 160)
RAM = "1MiB"
ONE_WEIGHT = 160 * 160 * 4 + (1 << 14)  # with the pages at its edges
ONE_INT8 = 160 * 160 + (1 << 14)  # of codes and scales


class Model(nn.Module):
    """Blocks that are big enough to go to the disk, a tie, and a parameter of the root."""

    def __init__(self, width: int = 160) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))
        self.tied = nn.Linear(width, width, bias=False)
        self.tied.weight = self.blocks[0].weight
        self.scale = nn.Parameter(torch.full((), 1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.isfinite().all():
            raise ValueError("values must be finite")
        return self.tied(self.blocks(x).tanh()) * self.scale


def made(storage: str | None = None, seed: int = 0, dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(seed)
    model = Model().to(dtype).eval()
    if storage is not None:
        stowage.stow(model, storage)
    return model


def offloaded(folder: Path, storage: str | None = None, seed: int = 0) -> Model:
    model = made(storage, seed)
    stowage.offload(model, ram=RAM, folder=folder)
    return model


KINDS = pytest.mark.parametrize("storage", [None, "int8"])

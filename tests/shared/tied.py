# SPDX-License-Identifier: Apache-2.0
"""A small model with a tie, and the bytes by which tests of masters compare what it holds."""

from __future__ import annotations

import gc
from pathlib import Path

import torch
from torch import nn

from stowage.tensor import StowedTensor


class Tied(nn.Module):
    """An embedding tied to its head, a norm, a buffer, a frozen layer and an odd shape."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 33)
        self.body = nn.Linear(33, 33)
        self.norm = nn.LayerNorm(33)
        self.frozen = nn.Linear(33, 33).requires_grad_(False)
        self.lm_head = nn.Linear(33, 48, bias=False)
        self.lm_head.weight = self.embed.weight
        self.register_buffer("scale", torch.rand(33))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.frozen(self.norm(self.body(self.embed(ids)) * self.scale)))


IDS = torch.tensor([[1, 5, 47], [0, 3, 3]])


def bits(model: nn.Module) -> dict[str, tuple[torch.dtype, bool, bytes]]:
    """Everything that must be as it was."""
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {
        name: (t.dtype, t.requires_grad, t.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, t in every
    }


def files(folder: Path) -> list[Path]:
    """What lies in a folder once nothing unreachable holds a file there."""
    gc.collect()
    return sorted(folder.iterdir()) if folder.exists() else []


def bits_at_rest(model: nn.Module) -> dict[str, bytes]:
    """Every part of every resting weight."""
    return {
        f"{name}.{part}": tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, weight in model.named_parameters()
        if isinstance(weight, StowedTensor)
        for part, tensor in weight.parts.items()
    }

# SPDX-License-Identifier: Apache-2.0
"""Modules whose parameters no layer owns, or several do."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Raw(nn.Module):
    """Parameters that no layer owns, in arithmetic of every sort."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {
            "scale_shift_table": (6, 16), "cls_token": (1, 1, 16), "gamma": (16,), "proj": (16, 16),
            "heads": (2, 16, 8), "memory": (2, 3, 8), "table": (5, 16), "temperature": (),
        }  # fmt: skip
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        shift, scale, *_ = (self.scale_shift_table[None] + x.mean(1)[:, None]).chunk(6, dim=1)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1) * (1 + scale) + shift
        x = x + self.gamma * torch.einsum("bnd,de->bne", x, self.proj)
        x = x @ self.proj + self.proj @ self.out(self.gamma) + self.out(self.cls_token)
        q = torch.bmm(x.transpose(0, 1)[:2], self.heads[:, :, :8])
        attended = F.scaled_dot_product_attention(q, self.memory, self.memory)
        rows = self.table[torch.tensor([0, 2])].sum() + self.table[1:3].mean()
        return x.sum(-1) / self.temperature.abs() + attended.mean() + rows + self.table[:, 2].sum()


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ParameterList([torch.randn(16, 16) for _ in range(2)])
        self.dict = nn.ParameterDict({"a": torch.randn(16, 16), "b": torch.randn(16)})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.list:
            x = F.linear(x, weight)
        return x @ self.dict["a"] + self.dict["b"]


class Shared(nn.Module):
    """One weight in two layers, one layer in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.b.weight, self.c = self.a.weight, self.a

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)))

# SPDX-License-Identifier: Apache-2.0
"""Models whose init values are kept. The oracle is the plain model of the same seed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import stowage
from stowage.training import quantized_init


class Net(nn.Module):
    """What constructors do to weights: their own init, other inits, reads, partial writes, ties."""

    def __init__(self, late: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 32, padding_idx=0)
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32, bias=False)
        self.conv = nn.Conv2d(4, 8, 3)
        self.head = nn.Linear(32, 40, bias=False)
        self.head.weight = self.table.weight
        nn.init.trunc_normal_(self.up.weight, std=0.02)
        nn.init.orthogonal_(self.conv.weight)
        self.down.weight.data.normal_(0, 0.02)
        self.down.weight.data[3].zero_()
        self.down.weight.data = self.down.weight.data / 3
        if not late:
            return
        nn.init.normal_(self.up.weight.data[8:16], std=0.3)
        with torch.no_grad():
            self.up.weight.view(-1)[:5] += 1
            torch._foreach_mul_([self.up.weight, self.down.weight], 0.5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.down(torch.tanh(self.up(self.table(ids)))))


def made(storage: str = "f8_e4m3:tensor", preserve_init: bool = True, **options: Any) -> Net:
    """Without kept values no init comes back to a weight when other modules have been made."""
    torch.manual_seed(0)
    with quantized_init(storage, preserve_init=preserve_init, **options):
        return Net(late=preserve_init)


def plain(late: bool = True) -> Net:
    torch.manual_seed(0)
    return Net(late)


def same_bytes(weight: Any, values: Tensor) -> bool:
    """Whether the weight is `values`, quantized once."""
    want = stowage.quantize(values, weight.resting)
    return all(torch.equal(weight.parts[name], want.parts[name]) for name in want.parts)


def one(rows: int = 8, columns: int = 16, **options: Any) -> Any:
    with quantized_init("f8_e4m3:tensor", preserve_init=True, **options):
        return nn.Linear(columns, rows)

# SPDX-License-Identifier: Apache-2.0
"""The first product with experts of a module says which of all its stacks are used: modules whose
products say so need no hook that looks at what they are given."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import stowage
from stowage._ops.library import composite_forced
from stowage._tensor.products import wants

pytestmark = pytest.mark.skipif(composite_forced(), reason="engines belong to the kernels")

EXPERTS, WIDTH, INNER = 8, 128, 256
PICKED = torch.tensor([[1, 6]])


class Experts(nn.Module):
    """As transformers have them: all of a stack in one product, or expert by expert."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.config = SimpleNamespace(_experts_implementation=way)
        self.gate_up_proj = self.made(INNER, WIDTH)
        self.down_proj = self.made(WIDTH, INNER)

    @staticmethod
    def made(rows: int, columns: int) -> nn.Parameter:
        values = (torch.randn(EXPERTS, rows, columns) * 0.02).bfloat16()
        return nn.Parameter(values, requires_grad=False)

    def forward(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        rows = x.repeat(numbers.numel(), 1)
        if self.config._experts_implementation == "eager":
            rows = torch.stack(
                [self.gate_up_proj[n] @ r for n, r in zip(numbers[0].tolist(), rows, strict=True)]
            )
            rows = torch.stack(
                [self.down_proj[n] @ r for n, r in zip(numbers[0].tolist(), rows, strict=True)]
            )
            return rows.sum(0)
        ends = torch.bincount(numbers[0], minlength=EXPERTS).cumsum(0).int()
        up = nn.functional.grouped_mm(rows, self.gate_up_proj.transpose(1, 2), offs=ends)
        down = nn.functional.grouped_mm(up, self.down_proj.transpose(1, 2), offs=ends)
        return down.sum(0)


def streamed(folder: Path, way: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Experts(way)).eval()
    stowage.stow(model, rules={"*_proj": "int8:row2"})
    room = stowage.nbytes(model) * 3 // 4
    stowage.offload(model, ram=room, folder=folder, reads="direct", workers=1)
    return model


@pytest.mark.parametrize("way", ["grouped_mm", "eager"])
@torch.no_grad()
def test_the_hook_looks_at_nothing_where_products_say_what_they_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    model = streamed(tmp_path, way)
    said: list[int] = []
    told = wants.library.engine_want

    def note(codes: Any, *rest: Any) -> bool:
        said.append(len(codes))
        return bool(told(codes, *rest))

    monkeypatch.setattr(wants.library, "engine_want", note)
    x = torch.randn(1, WIDTH).bfloat16()
    found = model[0](x, PICKED)
    assert said == ([2] if way == "eager" else [])
    used = stowage.uses(model).weights
    assert [w.by_index for w in used.values()] == [(0, 1, 0, 0, 0, 0, 1, 0)] * 2
    assert not any(w.misses for w in used.values())  # all had been begun
    stowage.onload(model)
    assert torch.equal(model[0](x, PICKED), found)


@torch.no_grad()
def test_of_one_expert_the_hook_says_all_stacks(tmp_path: Path) -> None:
    model = streamed(tmp_path, "grouped_mm")
    model[0](torch.randn(1, WIDTH).bfloat16(), torch.tensor([[3]]))
    used = stowage.uses(model).weights
    assert [w.ahead for w in used.values()] == [1, 1]


@torch.no_grad()
def test_who_uses_one_stack_is_taken_to_use_those_behind_it(tmp_path: Path) -> None:
    model = streamed(tmp_path, "grouped_mm")
    experts: Any = model[0]
    up, down = (stack._parts()[0] for stack in (experts.gate_up_proj, experts.down_proj))

    def begun() -> list[int]:
        used = stowage.uses(model).weights
        names = ("0.gate_up_proj", "0.down_proj")
        return [used[name].ahead if name in used else 0 for name in names]

    wants.library.engine_want([down], [2, 3], False, False)
    assert begun() == [0, 2]
    wants.library.engine_want([up], [1, 6], False, False)
    assert begun() == [2, 4]

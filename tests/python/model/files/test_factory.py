# SPDX-License-Identifier: Apache-2.0
"""`load(factory)`: parameters take no memory, and what a constructor computes has its values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import stowage


def clip_mask(n: int) -> Tensor:
    return torch.empty(n, n).fill_(float("-inf")).triu_(1)


def by_steps(n: int) -> Tensor:
    mask = torch.empty(n, n)
    mask.fill_(float("-inf"))
    mask.triu_(1)
    return mask


def written_by_index(n: int) -> Tensor:
    table = torch.empty(n, n)
    table[:, 0::2] = torch.arange(n).float()[:, None].sin()
    table[:, 1::2] = torch.arange(n).float()[:, None].cos()
    return table


def by_out(n: int) -> Tensor:
    made = torch.empty(n, n)
    torch.outer(torch.arange(n).float(), torch.ones(n), out=made)
    return made


MASKS: dict[str, Callable[[int], Tensor]] = {
    "clip": clip_mask,
    "by steps": by_steps,
    "by index": written_by_index,
    "out=": by_out,
    "full": lambda n: torch.full((n, n), float("-inf")).triu(1),
    "init": lambda n: nn.init.constant_(torch.empty(n, n), 0.5),
    "cumulated": lambda n: torch.zeros(n, n).copy_(torch.ones(n, n)).cumsum_(0),
}


class Net(nn.Module):
    """Masks as an attribute, as a buffer that no file holds, and inside a container."""

    def __init__(self, mask: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.attribute, self.masks = mask(4), [mask(3)]
        self.register_buffer("hidden", mask(4), persistent=False)
        self.register_buffer("kept", mask(4))
        self.project = nn.Linear(4, 4)
        self.bare = nn.Parameter(torch.empty(4, 4))
        nn.init.normal_(self.bare)
        self.drawn = nn.Parameter(nn.init.xavier_uniform_(torch.empty(4, 4)))
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.project.weight
        twice = nn.Parameter(torch.empty(4))
        twice.custom = "kept"  # type: ignore[attr-defined]
        self.first = self.second = twice
        nn.init.zeros_(twice)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.project(x) @ self.bare + self.attribute + self.hidden + self.drawn
        forward_time = torch.empty(4, 4).fill_(float("-inf")).triu_(1)
        return (scores + self.kept + forward_time + self.first).softmax(-1)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("on_meta", [False, True])
def test_masks_have_their_values(mask: str, on_meta: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net(MASKS[mask])
    stowage.save(model, tmp_path)

    def factory() -> Net:
        if not on_meta:
            return Net(MASKS[mask])
        with torch.device("meta"):
            return Net(MASKS[mask])

    seen: list[nn.Module] = []

    def watched() -> Net:
        made = factory()
        seen.append(made)
        assert all(p.is_meta for p in made.parameters())
        return made

    loaded = stowage.load(watched, tmp_path)
    assert torch.equal(loaded.attribute, model.attribute)
    assert torch.equal(loaded.masks[0], model.masks[0])
    assert torch.equal(loaded.hidden, model.hidden) and torch.equal(loaded.kept, model.kept)
    assert loaded.tied.weight is loaded.project.weight and loaded.first is loaded.second
    assert seen[0].first is seen[0].second
    x = torch.randn(4, 4)
    assert torch.equal(loaded(x).nan_to_num(), model(x).nan_to_num())


class Unwritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))
        self.register_buffer("statistics", torch.empty(4))
        self.register_buffer("drawn", torch.randn(4), persistent=False)


def test_buffers_that_nobody_wrote_must_come_from_the_file(tmp_path: Path) -> None:
    model = Unwritten()
    model.statistics.fill_(3)
    stowage.save(model, tmp_path)
    with pytest.raises(ValueError, match="drawn: must get a value"):
        stowage.load(Unwritten, tmp_path)


def test_attributes_of_parameters_stay(tmp_path: Path) -> None:
    stowage.save(Net(clip_mask), tmp_path)
    made: list[Net] = []
    stowage.load(lambda: made.append(Net(clip_mask)) or made[0], tmp_path)
    assert isinstance(made[0].first, nn.Parameter)


def test_a_large_model_takes_no_memory_while_it_is_built(tmp_path: Path) -> None:
    """More than the machine has, of addresses too: each parameter's go when it has its place."""
    size = 1 << 14

    class Huge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(200))

    from stowage._model.files.factory import build

    before = _resident()
    model = build(Huge)
    assert all(p.is_meta for p in model.parameters())
    assert _resident() - before < 32 << 20


def _resident() -> int:
    lines = Path("/proc/self/status").read_text().split("VmRSS:")[1]
    return int(lines.split()[0]) * 1024

# SPDX-License-Identifier: Apache-2.0
"""The router of a mixture's next layer is asked about the input of this one: what it picks is
prefetched behind what this layer uses, and no result changes."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from forking import in_child
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import stowage
from stowage._ops.library import composite_forced
from stowage._tensor.products import wants
from stowage._tiers.disk import routing

pytestmark = pytest.mark.skipif(composite_forced(), reason="engines belong to the kernels")

EXPERTS, PICKED, WIDTH = 16, 2, 128
LAYERS = 3
ONE = WIDTH * WIDTH + 4 * 4096  # bytes of a matrix, with the pages that it shares


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        values = torch.randn(EXPERTS, WIDTH, WIDTH) * 0.01
        self.up = nn.Parameter(values.bfloat16(), requires_grad=False)

    def forward(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        rows = [
            torch.stack([nn.functional.linear(row, self.up[n]) for n in of]).sum(0)
            for row, of in zip(x, numbers.tolist(), strict=True)
        ]
        return torch.stack(rows)


class TopK(nn.Module):
    """As transformers' routers: logits, scores, numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH).bfloat16(), requires_grad=False)
        self.asked = 0

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.asked += 1
        logits = x @ self.weight.t()
        scores, numbers = logits.topk(PICKED)
        return logits, scores, numbers


class Block(nn.Module):
    def __init__(self, *, linear: bool) -> None:
        super().__init__()
        self.gate: Any = nn.Linear(WIDTH, EXPERTS, bias=False).bfloat16() if linear else TopK()
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.gate(x)
        numbers = found[2] if isinstance(found, tuple) else found.topk(PICKED).indices
        return x + self.experts(x, numbers)


def mixture(*, linear: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(linear=linear) for _ in range(LAYERS)))
    stowage.stow(model, rules={"*.up": "int8:row2"})
    return model.eval()


def streamed(folder: Path, matrices: int = 12, **how: Any) -> nn.Sequential:
    """With room for so many."""
    model = mixture(linear=how.pop("linear", False))
    how.setdefault("route_ahead", True)
    stowage.offload(model, ram=matrices * ONE, folder=folder, reads="direct", **how)
    return model


def tokens(count: int) -> list[torch.Tensor]:
    torch.manual_seed(5)
    return [torch.randn(1, WIDTH).bfloat16() for _ in range(count)]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], bool]]:
    """What engines were told: the numbers, and whether these were a guess."""
    every: list[tuple[list[int], bool]] = []
    told = wants.library.engine_want

    def note(codes: Any, numbers: list[int], one_by_one: bool, after: bool) -> bool:
        every.append((list(numbers), after))
        return bool(told(codes, numbers, one_by_one, after))

    monkeypatch.setattr(wants.library, "engine_want", note)
    return every


@pytest.mark.parametrize("linear", [False, True])
@torch.no_grad()
def test_the_next_router_is_asked_about_this_input(
    linear: bool, said: list[tuple[list[int], bool]], tmp_path: Path
) -> None:
    model = streamed(tmp_path / "w", linear=linear)
    inputs: list[torch.Tensor] = []
    for block in model:
        block.experts.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    model(tokens(1)[0])
    wanted = []
    for i, x in enumerate(inputs):
        for after, gate in ((False, model[i].gate), (True, model[min(i + 1, LAYERS - 1)].gate)):
            found = gate(x)
            numbers = found[2] if isinstance(found, tuple) else found.topk(PICKED).indices
            wanted.append((sorted(numbers.flatten().tolist()), after))
    assert said == wanted[:-1]  # none follows the last


@torch.no_grad()
def test_what_was_guessed_is_there(tmp_path: Path) -> None:
    """Layers add little here, so that guesses are right; reads begin before routers have said."""
    model = streamed(tmp_path / "w")
    for x in tokens(6):
        model(x)
    uses = stowage.uses(model).weights
    guessed = [uses[f"{i}.experts.up"] for i in range(1, LAYERS)]
    assert all(found.misses == 0 and found.ahead > 0 for found in guessed)
    report = stowage.engine_report(model)
    assert report.unused <= report.ahead // 4 and report.peak <= 12 * ONE


MODES = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "grad": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("matrices", [3, 5, 12, 2 * LAYERS * EXPERTS])
def test_results_are_the_same(matrices: int, mode: str, tmp_path: Path) -> None:
    plain = mixture()
    with_it = streamed(tmp_path / "a", matrices)
    without = streamed(tmp_path / "b", matrices, route_ahead=False)
    every = tokens(12)
    with MODES[mode]():
        for x in every:
            wanted = plain(x)
            assert torch.equal(with_it(x), wanted) and torch.equal(without(x), wanted)
    assert with_it[1].gate.asked > without[1].gate.asked == len(every)
    for model in (with_it, without):
        report = stowage.engine_report(model)
        assert report.borrowed == 0 and report.peak <= matrices * ONE


@torch.no_grad()
def test_it_is_not_asked(said: list[tuple[list[int], bool]], tmp_path: Path) -> None:
    model = streamed(tmp_path / "w")
    many = torch.cat(tokens(EXPERTS))  # reach most experts anyway
    model(many)
    assert not any(after for _, after in said)
    model.train()
    model(tokens(1)[0])
    assert not any(after for _, after in said)
    model.eval()
    model(tokens(1)[0])
    assert any(after for _, after in said)
    off = mixture()
    stowage.offload(off, ram=12 * ONE, folder=tmp_path / "off")  # as it is where nobody says
    said.clear()
    off(tokens(1)[0])
    assert said and not any(after for _, after in said)


@torch.no_grad()
def test_it_is_not_asked_where_all_is_there(tmp_path: Path) -> None:
    model = streamed(tmp_path / "w", 2 * LAYERS * EXPERTS)
    x = tokens(1)[0]
    for _ in range(20):
        model(x)
    before = [block.gate.asked for block in model]
    model(x)
    assert [block.gate.asked - n for block, n in zip(model, before, strict=True)] == [1, 1, 1]


@torch.no_grad()
def test_hooks_of_the_router_do_not_see_it(tmp_path: Path) -> None:
    model = streamed(tmp_path / "w")
    calls: list[Any] = []
    for block in model:
        block.gate.register_forward_hook(lambda module, *_: calls.append(module))
    model(tokens(1)[0])
    assert calls == [block.gate for block in model]
    assert [block.gate.asked for block in model] == [1, 2, 2]


@torch.no_grad()
def test_a_router_that_takes_another_input_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Strange(TopK):
        def forward(self, x: torch.Tensor, block: nn.Module) -> Any:
            return super().forward(x)

    class StrangeBlock(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.experts(x, self.gate(x, self)[2])

    torch.manual_seed(0)
    model = nn.Sequential(Block(linear=False), StrangeBlock(linear=False)).eval()
    model[1].gate = Strange()
    stowage.stow(model, rules={"*.up": "int8:row2"})
    x = tokens(1)[0]
    wanted = model(x)
    how: dict[str, Any] = {"reads": "direct", "route_ahead": True}
    stowage.offload(model, ram=12 * ONE, folder=tmp_path / "w", **how)
    with caplog.at_level(logging.INFO, "stowage"):
        assert all(torch.equal(model(x), wanted) for _ in range(3))
    told = [r.getMessage() for r in caplog.records if "not asked ahead" in r.getMessage()]
    assert len(told) == 1 and "Strange is not asked ahead" in told[0] and "'block'" in told[0]


@torch.no_grad()
def test_modes_that_follow_operations_do_not_see_it(tmp_path: Path) -> None:
    models = [streamed(tmp_path / str(on), route_ahead=on) for on in (True, False)]
    counted = []
    for model in models:
        with FlopCounterMode(display=False) as counter:
            model(tokens(1)[0])
        counted.append(counter.get_total_flops())
        assert [block.gate.asked for block in model] == [1, 1, 1]
    assert counted[0] == counted[1] > 0


@torch.no_grad()
def test_one_matrix_is_guessed_too(
    said: list[tuple[list[int], bool]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A router that picks one expert, of one stack: what is used needs no word, a guess does."""
    monkeypatch.setattr(sys.modules[__name__], "PICKED", 1)
    model = streamed(tmp_path / "w")
    for x in tokens(12):
        model(x)
    assert len(said) == 12 * (LAYERS - 1) and all(after for _, after in said)


def test_where_it_has_no_effect_it_is_refused_or_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "saved"
    stowage.save(mixture(), folder)
    for call, words in {
        lambda: stowage.load(mixture, folder, route_ahead=True): "route_ahead must come with ram",
        lambda: stowage.offload(mixture(), ram="1MiB", route_ahead=True): "route_ahead must come",
        lambda: streamed(tmp_path / "none", workers=0): "route_ahead must come with workers",
    }.items():
        with pytest.raises(stowage.InvalidArgument, match=words):
            call()
    dense = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    stowage.offload(dense, ram="1MiB", folder=tmp_path / "dense", route_ahead=True)
    assert "route_ahead has no effect" in caplog.text


@torch.no_grad()
def test_a_forked_child_has_the_same_results(tmp_path: Path) -> None:
    model = streamed(tmp_path / "w")
    x = tokens(1)[0]
    wanted = model(x)
    in_child(lambda: torch.equal(model(x), wanted))


@torch.no_grad()
def test_nothing_of_it_is_left(tmp_path: Path) -> None:
    model = streamed(tmp_path / "w")
    model(tokens(1)[0])
    assert len(routing._following) == LAYERS - 1
    stowage.onload(model)
    assert len(routing._following) == 0
    again = streamed(tmp_path / "again")
    gone = weakref.ref(again[1].experts)
    gc.collect()
    gc.disable()
    try:
        del again
        assert gone() is None and len(routing._following) == 0
    finally:
        gc.enable()


def test_a_layer_that_is_copied_or_pickled_is_alone(tmp_path: Path) -> None:
    model = streamed(tmp_path / "w")
    size = len(pickle.dumps(model[2].experts))
    assert len(pickle.dumps(model[0].experts)) <= 1.1 * size
    copied = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(copied(tokens(1)[0]), model(tokens(1)[0]))
    assert [block.gate.asked for block in copied] == [1, 1, 1]
    assert [block.gate.asked for block in model] == [1, 2, 2]

# SPDX-License-Identifier: Apache-2.0
"""Mixtures whose experts are modules of a list, as the first code of Mixtral and DeepSeek has them:
what a router picks comes together, and nothing else of the list does."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import stowage
from stowage._ops.library import composite_forced

pytestmark = pytest.mark.skipif(composite_forced(), reason="engines belong to the kernels")

LAYERS, EXPERTS, PICKED, WIDTH, INNER = 3, 16, 2, 256, 128
OF_EXPERT, PAGES = 3, 2 * 4096  # matrices; bytes at both ends of a part


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, INNER, bias=False)
        self.w2 = nn.Linear(INNER, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, INNER, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Gate(nn.Module):
    """As DeepSeek has it: it says which experts it picks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH) / 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, picked = F.linear(x, self.weight).softmax(-1).topk(PICKED)
        return picked, weights


class Block(nn.Module):
    """By the scores of a Linear, as Mixtral does, or by what a gate says."""

    def __init__(self, says: bool) -> None:
        super().__init__()
        self.top_k = PICKED  # which is only said
        self.gate: nn.Module = Gate() if says else nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.used: list[set[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        found = self.gate(x)
        if isinstance(found, tuple):
            picked, weights = found
        else:
            weights, picked = found.softmax(-1).topk(PICKED)
        self.used.append(set(picked.unique().tolist()))
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            row, place = torch.where(picked == index)
            if len(row):
                out.index_add_(0, row, expert(x[row]) * weights[row, place, None].to(x.dtype))
        return x + out


class Model(nn.Module):
    def __init__(self, says: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(says) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def used(self) -> int:
        """Uses of experts, by each pass and layer."""
        return sum(len(some) for layer in self.layers for some in layer.used)


def build(says: bool = False) -> Model:
    torch.manual_seed(0)
    return Model(says).bfloat16().eval().requires_grad_(False)


def tokens(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16()


def stored(folder: Path, storage: str | None, says: bool) -> tuple[Model, int]:
    """A model in memory, of which the file is, and bytes of one expert there."""
    model = build(says)
    if storage is not None:
        stowage.stow(model, storage)
    stowage.save(model, folder)
    one = stowage.nbytes(model.layers[0].experts[0])
    return model, one


@pytest.mark.parametrize("reads", ["buffered", "mapped"])
@pytest.mark.parametrize("says", [False, True])
@pytest.mark.parametrize("storage", [None, "int8:row", "nf4", "f8_e4m3:block128x128", "mxfp4"])
def test_only_what_is_picked_is_read(
    tmp_path: Path, storage: str | None, says: bool, reads: str
) -> None:
    whole, one = stored(tmp_path, storage, says)
    room = one + OF_EXPERT * PAGES
    ram = 2 * PICKED * room + stowage.nbytes(whole) - LAYERS * EXPERTS * one + 8 * PAGES
    model = stowage.load(lambda: build(says), tmp_path, ram=ram, reads=reads)
    others = stowage.nbytes(whole) - LAYERS * EXPERTS * one + LAYERS * PAGES
    x = tokens(1)
    assert torch.equal(model(x), whole(x))
    report = stowage.engine_report(model)
    assert model.used() == LAYERS * PICKED
    assert report.bytes_read <= others + model.used() * room
    for seed in range(6):
        for count in (1, 3, 24):
            x = tokens(count, seed)
            assert torch.equal(model(x), whole(x)), (seed, count)
    report = stowage.engine_report(model)
    assert report.borrowed == 0 and report.peak <= ram
    assert report.bytes_read <= others + model.used() * room


def test_all_of_a_layer_is_on_its_way_together(tmp_path: Path) -> None:
    """After the router each matrix of what it picked has been begun: the first is waited for at
    most, of the rest none has to be asked for."""
    whole, _ = stored(tmp_path, "int8:row", False)
    model = stowage.load(build, tmp_path, ram=stowage.nbytes(whole) // 2, reads="buffered")
    for seed in range(8):
        model(tokens(1, seed))
    found = stowage.uses(model).weights
    experts = [uses for name, uses in found.items() if ".experts." in name]
    assert sum(uses.misses for uses in experts) == 0
    assert sum(uses.ahead for uses in experts) > OF_EXPERT * PICKED * LAYERS
    assert sum(uses.unused for uses in experts) == 0


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("says", [False, True])
def test_the_next_layers_router_is_asked_ahead(tmp_path: Path, says: bool, ahead: bool) -> None:
    whole, _ = stored(tmp_path, "int8:row", says)
    model = stowage.load(
        lambda: build(says), tmp_path, ram=stowage.nbytes(whole) // 2, route_ahead=ahead
    )
    asked: list[Tensor] = []
    for layer in model.layers:
        forward = layer.gate.forward

        def counted(x: Tensor, forward: Callable[[Tensor], Any] = forward) -> Any:
            asked.append(x)
            return forward(x)

        layer.gate.forward = counted  # type: ignore[method-assign]
    for seed in range(4):
        assert torch.equal(model(tokens(1, seed)), whole(tokens(1, seed)))
    assert len(asked) == 4 * (2 * LAYERS - 1 if ahead else LAYERS)
    asked.clear()
    model(tokens(12))  # which reaches most: nobody guesses
    assert len(asked) == LAYERS


def test_nothing_of_ours_is_seen_by_who_follows_the_operations(tmp_path: Path) -> None:
    whole, _ = stored(tmp_path, "int8:row", False)
    model = stowage.load(build, tmp_path, ram=stowage.nbytes(whole) // 2)
    seen = []
    for one in (whole, model):
        with Operations() as follows:
            one(tokens(2))
        seen.append([name for name in follows.names if name != "stowage.engine_signature.default"])
    assert seen[0] == seen[1]


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


MODES: dict[str, Callable[[], Any]] = {
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default device": lambda: torch.device("meta"),
    "saved tensors": lambda: torch.autograd.graph.save_on_cpu(),
}


@pytest.mark.parametrize("mode", MODES)
def test_modes(tmp_path: Path, mode: str) -> None:
    whole, _ = stored(tmp_path, "nf4", False)
    model = stowage.load(
        build, tmp_path, ram=stowage.nbytes(whole) // 2, reads="buffered", route_ahead=True
    )
    every = [tokens(1, seed) for seed in range(3)]
    wanted = [whole(x) for x in every]
    with MODES[mode]():
        assert all(torch.equal(model(x), y) for x, y in zip(every, wanted, strict=True))
    report = stowage.engine_report(model)
    assert report.borrowed == 0 and report.ahead > 0


def test_threads_share_them(tmp_path: Path) -> None:
    whole, _ = stored(tmp_path, "int8:row", True)
    model = stowage.load(lambda: build(True), tmp_path, ram=stowage.nbytes(whole) // 2)
    every = [tokens(2, seed) for seed in range(24)]
    wanted = [whole(x) for x in every]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(model, every))
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


def test_a_forked_child_reads_them_too(tmp_path: Path) -> None:
    whole, _ = stored(tmp_path, "int8:row", False)
    model = stowage.load(build, tmp_path, ram=stowage.nbytes(whole) // 2)
    x = tokens(1)
    wanted = whole(x)
    model(x)
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        os._exit(0 if torch.equal(model(x), wanted) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_what_is_picked_often_stays(tmp_path: Path) -> None:
    whole, _ = stored(tmp_path, "int8:row", True)
    ram = stowage.nbytes(whole) // 2
    model = stowage.load(lambda: build(True), tmp_path, ram=ram, reads="buffered")
    common, rare = tokens(1), [tokens(1, seed) for seed in range(2, 40)]
    for x in rare:
        model(common), model(common), model(x)
    before = stowage.engine_report(model).bytes_read
    model(common)
    assert stowage.engine_report(model).bytes_read == before


def test_uses_are_by_layer_and_serve_plans_and_other_runs(tmp_path: Path) -> None:
    whole, _ = stored(tmp_path, "int8:row", True)
    ram = stowage.nbytes(whole) // 2
    model = stowage.load(lambda: build(True), tmp_path, ram=ram, reads="buffered")
    x = tokens(2)
    wanted = whole(x)
    for _ in range(5):
        model(x)
    found = stowage.uses(model)
    assert list(found.layers) == [f"layers.{i}" for i in range(LAYERS)]
    for layer, block in zip(found.layers.values(), model.layers, strict=True):
        assert {e for e, n in enumerate(layer.by_index) if n} == block.used[0]
        assert layer.acquired == 5 * OF_EXPERT * len(block.used[0])
    found.save(tmp_path / "uses.json")
    plan = stowage.plan(tmp_path, ram=ram, routed=PICKED, uses=tmp_path / "uses.json")
    assert plan.predicted.hits is not None and plan.predicted.hits > 0.5
    planned = stowage.load(lambda: build(True), tmp_path, plan=plan)
    for _ in range(2):
        before = stowage.engine_report(planned).bytes_read
        assert torch.equal(planned(x), wanted)
    assert stowage.engine_report(planned).bytes_read == before
    again = stowage.load(lambda: build(True), tmp_path, ram=ram, reads="buffered")
    stowage.foresee(again, found)
    assert torch.equal(again(x), wanted)
    experts = [uses for name, uses in stowage.uses(again).weights.items() if ".experts." in name]
    assert sum(uses.misses for uses in experts) == 0


def test_offload_knows_them_too(tmp_path: Path) -> None:
    model, whole = build(), build()
    stowage.stow(model, "nf4")
    stowage.stow(whole, "nf4")
    stowage.offload(model, ram=stowage.nbytes(whole) // 2, folder=tmp_path)
    x = tokens(1)
    assert torch.equal(model(x), whole(x))
    found = stowage.uses(model).weights
    used = {name for name in found if ".experts." in name}
    assert len(used) == LAYERS * PICKED * OF_EXPERT


def test_gradients_go_through_them(tmp_path: Path) -> None:
    whole, _ = stored(tmp_path, "int8:row", False)
    model = stowage.load(build, tmp_path, ram=stowage.nbytes(whole) // 2)
    found = []
    for one in (whole, model):
        x = tokens(3).requires_grad_()
        one(x).float().square().sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)  # type: ignore[arg-type]


def test_compiled_graphs_have_the_same_values(tmp_path: Path) -> None:
    whole, _ = stored(tmp_path, "int8:row", False)
    model = stowage.load(build, tmp_path, ram=stowage.nbytes(whole) // 2)
    x = tokens(2)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(compiled(x), whole(x))


def test_copies_and_pickles_have_their_own(tmp_path: Path) -> None:
    whole, _ = stored(tmp_path, "nf4", False)
    model = stowage.load(build, tmp_path, ram=stowage.nbytes(whole) // 2, reads="buffered")
    x = tokens(3)
    wanted = whole(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        hook = next(iter(other.layers[0].gate._forward_hooks.values()), None)
        assert hook is None or hook._experts is other.layers[0].experts
        assert torch.equal(other(x), wanted)
    stowage.onload(model)
    assert not model.layers[0].gate._forward_hooks
    assert torch.equal(model(x), wanted)


def test_of_scores_alone_an_order_is_learnt(tmp_path: Path) -> None:
    """Where nobody says how many experts a token takes, they come as other weights do."""

    def unknown() -> Model:
        model = build()
        for layer in model.layers:
            del layer.top_k
        return model

    whole, _ = stored(tmp_path, "int8:row", False)
    model = stowage.load(unknown, tmp_path, ram=stowage.nbytes(whole) // 2, reads="buffered")
    for count in (2, 40, 40):
        assert torch.equal(model(tokens(count)), whole(tokens(count)))
    assert not any(layer.gate._forward_hooks for layer in model.layers)
    found = stowage.uses(model).weights
    assert not any(uses.by_index for uses in found.values())
    assert any(uses.ahead for name, uses in found.items() if ".experts." in name)

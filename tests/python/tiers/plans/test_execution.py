# SPDX-License-Identifier: Apache-2.0
"""Plans that are carried out: what they say stays in memory does, within the limits. Plans for
other models and machines, and arguments that a plan decides, are refused."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from links_here import give_links
from torch import nn

import stowage

WIDTH, LAYERS = 384, 10
X = torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH)
IDS = torch.arange(6)


class Model(nn.Module):
    """Layers that are used once, and an embedding that is larger than all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9000, WIDTH)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x + self.embed(IDS).mean(0))


@pytest.fixture(autouse=True)
def links(monkeypatch: pytest.MonkeyPatch) -> None:
    give_links(monkeypatch)


def made(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    model = Model().eval().requires_grad_(False)
    stowage.stow(model, "int8")
    return model


def one() -> int:
    """Bytes of a layer's weight in memory, with the edges of its pages."""
    return stowage.nbytes(made().layers[0].weight) + 2 * 4096


def limit(layers: float) -> int:
    """Of RAM: so many layers beside the small tensors and the tile."""
    plan = stowage.plan(made(), ram="1GiB", rows=2)
    everything = sum(unit.bytes for unit in plan.units if unit.tier == "ram" and not unit.stays)
    return plan.predicted.peak["ram"] - everything + int(layers * one())


def passes(model: nn.Module, wanted: torch.Tensor, count: int = 4) -> None:
    for _ in range(count):
        assert torch.equal(model(X), wanted)


@pytest.mark.parametrize("reads", ["mapped", "buffered", "direct"])
def test_what_is_planned_to_stay_is_read_once(tmp_path: Path, reads: str) -> None:
    model = made()
    wanted = model(X)
    plan = stowage.plan(model, ram=limit(6), rows=2)
    stays = plan.names("ram")
    assert 2 <= len(stays) < LAYERS and "embed.weight" in plan.names("disk")
    stowage.offload(model, plan=plan, folder=tmp_path, reads=reads)
    passes(model, wanted, 2)
    before = stowage.engine_report(model)
    passes(model, wanted, 3)
    once = stowage.engine_report(model).since(before)
    # Pages at the edges in the file may leave room for one less than planned, and the last pass
    # has begun to read for the next.
    streamed = 3 * (LAYERS - len(stays) + 1)
    assert once.bytes_read <= (streamed + 2) * one()
    assert once.peak + 1 <= limit(6)
    assert once.hits >= 3 * (len(stays) - 1)


def test_a_saved_model_is_loaded_by_its_plan(tmp_path: Path) -> None:
    model = made()
    wanted = model(X)
    stowage.save(model, tmp_path / "saved")
    plan = stowage.plan(tmp_path / "saved", ram=limit(5), rows=2)
    plan.save(tmp_path / "plan.json")
    loaded = stowage.load(Model, tmp_path / "saved", plan=tmp_path / "plan.json")
    passes(loaded, wanted)
    report = stowage.engine_report(loaded)
    assert report.peak <= limit(5) and report.borrowed == 0
    assert report.probe == 2e9 and "GB/s of 2.00)" in str(report)
    passes(copy.deepcopy(loaded), wanted, 1)
    passes(pickle.loads(pickle.dumps(loaded)), wanted, 1)
    stowage.onload(loaded)
    passes(loaded, wanted, 1)


def test_less_room_plans_anew_and_more_does_too(tmp_path: Path) -> None:
    model = made()
    wanted = model(X)
    stowage.offload(model, plan=stowage.plan(model, ram=limit(8), rows=2), folder=tmp_path)
    passes(model, wanted)
    for layers in (4, 2.5, 9):
        stowage.rebudget(model, limit(layers))
        passes(model, wanted)
        assert stowage.engine_report(model).held <= limit(layers)
    before = stowage.engine_report(model).acquired
    with pytest.raises(stowage.InvalidArgument, match="ram must be at least"):
        stowage.rebudget(model, limit(0.5))
    passes(model, wanted)
    assert stowage.engine_report(model).acquired == before + 4 * LAYERS
    stowage.onload(model)
    with pytest.raises(stowage.InvalidArgument, match="must rest on a disk"):
        stowage.rebudget(model, "1MiB")


def test_a_budget_without_a_plan_changes_too(tmp_path: Path) -> None:
    model = made()
    wanted = model(X)
    stowage.offload(model, ram=5 * one(), folder=tmp_path, reads="buffered")
    passes(model, wanted)
    stowage.rebudget(model, 2 * one())
    passes(model, wanted)
    assert stowage.engine_report(model).held <= 2 * one()
    with pytest.raises(stowage.InvalidArgument, match="must hold the largest weight"):
        stowage.rebudget(model, one() // 2)
    passes(model, wanted)


def test_an_embedding_needs_no_room(tmp_path: Path) -> None:
    model = made()
    wanted = model(X)
    assert stowage.nbytes(model.embed.weight) > 5 * one()
    stowage.offload(model, ram=2 * one(), folder=tmp_path / "w")
    passes(model, wanted)
    loaded = stowage.load(Model, tmp_path / "w", ram=2 * one())
    passes(loaded, wanted)
    assert stowage.engine_report(loaded).peak <= 2 * one()
    assert torch.equal(loaded.embed.weight.dequantize(), made().embed.weight.dequantize())


def refused(match: str, /, **given: Any) -> None:
    model = made()
    wanted = model(X)
    with pytest.raises(stowage.InvalidArgument, match=match):
        stowage.offload(model, **given)
    assert torch.equal(model(X), wanted)


def test_what_cannot_be_carried_out_is_refused(tmp_path: Path) -> None:
    plan = stowage.plan(made(), ram=limit(4), rows=2)
    into = tmp_path / "w"
    refused("plan must come without .* got ram='1MiB' too", plan=plan, ram="1MiB", folder=into)
    refused("plan must come without .* device='cpu'", plan=plan, device="cpu", folder=into)
    refused("folder must come with a plan", plan=plan)
    other = json.loads(plan.to_json())
    other["machine"]["key"] = "another machine"
    refused("for another machine", plan=stowage.Plan(json.dumps(other)), folder=into)
    plain = stowage.plan(Model(), ram="1GiB", rows=2)
    refused("in the plan", plan=plain, folder=into)
    assert not into.exists()
    stowage.save(made(), into)
    with pytest.raises(stowage.InvalidArgument, match="plan must come without"):
        stowage.load(Model, into, plan=plan, ram="1MiB")
    with pytest.raises(stowage.InvalidArgument, match="ram and plan must come without storage"):
        stowage.load(Model, into, "nf4", plan=plan)


def test_the_time_of_a_pass_is_told_beside_the_planned_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = made()
    slow = json.loads(stowage.plan(model, ram=limit(4), rows=2).to_json())
    slow["predicted"]["seconds"] = 30.0
    stowage.offload(model, plan=stowage.Plan(json.dumps(slow)), folder=tmp_path)
    with caplog.at_level(logging.INFO, logger="stowage"):
        model(X)
        assert not caplog.records  # the first pass learns
        for _ in range(3):
            model(X)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "for 2 rows: predicted 30" in record.getMessage()


@pytest.mark.parametrize("storage", ["int8", "int8:block32", "nf4", "nf4:block64:nested"])
def test_the_least_that_a_plan_takes_is_enough(storage: str, tmp_path: Path) -> None:
    """The defect: codes and scales share pages with others once they are in a file, which a plan
    for a model did not count, so that its folder wanted more than the plan gave."""
    for width in (64, 250, 256, 1000):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(5)))
        stowage.stow(model, storage)
        wanted = model(X[:, :1].expand(2, width))
        with pytest.raises(stowage.InvalidArgument) as refused:
            stowage.plan(model, ram=1, rows=2, folder=tmp_path)
        least = int(re.findall(r"at least (\d+) bytes", str(refused.value))[0])
        plan = stowage.plan(model, ram=least, rows=2, folder=tmp_path)
        stowage.offload(model, plan=plan, folder=tmp_path / f"{width}")
        assert torch.equal(model(X[:, :1].expand(2, width)), wanted)


@pytest.mark.parametrize("ram", ["200KiB", "1MiB"])
def test_small_weights_that_rest_as_casts(ram: str, tmp_path: Path) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
        return layers.eval().requires_grad_(False)

    model, x = build(), torch.linspace(-1, 1, 64)
    stowage.stow(model, "bf16")
    wanted = model(x)
    stowage.save(model, tmp_path / "m")
    loaded = stowage.load(build, tmp_path / "m", plan=stowage.plan(tmp_path / "m", ram=ram))
    assert torch.equal(loaded(x), wanted)
    stowage.offload(model, plan=stowage.plan(model, ram=ram), folder=tmp_path / "o")
    assert torch.equal(model(x), wanted)

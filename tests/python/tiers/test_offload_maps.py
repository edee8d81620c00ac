# SPDX-License-Identifier: Apache-2.0
"""Device maps by name where the CPU computes. Devices: tests/pretend/test_maps.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stowage
from stowage._tiers.plans.execution import kept_plan
from stowage.planning import machine_key

X = torch.linspace(-1, 1, 2 * 512).reshape(2, 512)
KIB = 1 << 10
LAYERS, LAYER = 8, 258 * KIB  # codes and scales


@pytest.fixture(autouse=True)
def _links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates that are there, so that nothing is measured."""
    rates = {"key": machine_key(), "disk": 2e9, "cached": 6e9, "memcpy": 1e10}
    linear = {n: {"read": 8e9, "multiply": 2e11} for n in ("f32", "int8")}
    rates |= {"linear": linear, "accelerators": {}}
    monkeypatch.setattr("stowage._tiers.plans.plan.measured_links", lambda *_, **__: rates)


def made() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(LAYERS)]).eval()
    stowage.stow(model, "int8")
    return model.requires_grad_(False)


@pytest.mark.parametrize("room", [1400 * KIB, 1700 * KIB, 64 << 20])
@pytest.mark.parametrize("name", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_results_and_limits(name: str, room: int, tmp_path: Path) -> None:
    model, wanted = made(), made()(X)
    stowage.offload(model, ram=room, folder=tmp_path / "w", device_map=name)
    for _ in range(3):
        before = stowage.engine_report(model)
        assert torch.equal(model(X), wanted)
    report = stowage.engine_report(model)
    kept = [m.weight for m in model if not _is_mapped(m.weight, tmp_path)]
    assert report.peak + len(kept) * LAYER <= room
    if room >= LAYERS * (LAYER + 16 * KIB):
        assert report.since(before).bytes_read == 0, "all of it fits"


def _is_mapped(weight: torch.Tensor, folder: Path) -> bool:
    """Whether the codes lie in the mapping of the file."""
    assert isinstance(weight, stowage.StowedTensor)
    at = next(iter(weight.parts.values())).data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(x, 16) for x in line.split()[0].split("-"))
        if begin <= at < end:
            return str(folder) in line
    return False


@pytest.mark.parametrize("name", ["balanced", "balanced_low_0", "sequential"])
def test_the_first_modules_stay(name: str, tmp_path: Path) -> None:
    model = made()
    stowage.offload(model, ram=1700 * KIB, folder=tmp_path / "w", device_map=name)
    away = [_is_mapped(m.weight, tmp_path) for m in model]
    assert away == sorted(away) and 0 < sum(away) < LAYERS


def test_auto_is_a_plan(tmp_path: Path) -> None:
    one, two = made(), made()
    stowage.offload(one, ram=1700 * KIB, folder=tmp_path / "1", device_map="auto")
    plan = stowage.plan(two, ram=1700 * KIB)
    stowage.offload(two, plan=plan, folder=tmp_path / "2")
    kept = [kept_plan(m) for m in (one, two)]
    assert kept[0] is not None and kept[1] is not None
    assert kept[0].plan.facts == kept[1].plan.facts == plan.facts
    for _ in range(3):
        before = [stowage.engine_report(m) for m in (one, two)]
        assert torch.equal(one(X), two(X))
    for model, earlier in zip((one, two), before, strict=True):
        assert stowage.engine_report(model).since(earlier).bytes_read > 0, "not all of it fits"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"device_map": "even"}, "of auto, balanced, balanced_low_0, sequential, got 'even'"),
        ({"device_map": "auto"}, "ram must come with device_map='auto'"),
        ({"device_map": "balanced"}, "ram must come with device_map='balanced'"),
        ({"device_map": "auto", "plan": "p.json"}, "without what it decides, got .*device_map"),
        ({"device_map": "auto", "ram": 9, "accelerator": 9}, "must come with a device"),
        ({"device_map": "auto", "ram": "1MiB", "device": "cuda:7"}, "device must be one that is"),
        ({"accelerator": {"cuda:0": "1GiB"}, "ram": "1MiB"}, "bytes where device_map is no name"),
    ],
)
def test_refused(given: dict[str, Any], told: str, tmp_path: Path) -> None:
    model, folder = made(), tmp_path / "w"
    with pytest.raises(stowage.InvalidArgument, match=told):
        stowage.offload(model, folder=folder, **given)
    assert not folder.exists() and torch.equal(model(X), made()(X))

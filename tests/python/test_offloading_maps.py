# SPDX-License-Identifier: Apache-2.0
"""What the caller says of places: devices, maps of modules, and arguments that contradict."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from offloadable import RAM, Model, X, made

import stowage


def tiers(model: Model) -> dict[str, str]:
    return {row.name: row.tier for row in stowage.report(model).rows}


@pytest.mark.parametrize("storage", [None, "int8"])
def test_modules_that_stay(storage: str | None, tmp_path: Path) -> None:
    model, wanted = made(storage), made(storage)(X)
    stays = model.blocks[1].weight
    places = {"blocks.1": "ram", "blocks.2.weight": "disk"}
    stowage.offload(model, ram=RAM, folder=tmp_path, device="cpu", device_map=places)
    assert torch.equal(model(X), wanted)
    found = tiers(model)
    assert found["blocks.1.weight"] == "ram" and model.blocks[1].weight is stays
    assert found["blocks.0.weight"] == found["blocks.2.weight"] == "disk"
    assert stowage.engine_report(model).written == 0
    stowage.onload(model)
    stowage.offload(model, ram=RAM, folder=tmp_path, device_map={"": "ram"})
    assert set(tiers(model).values()) == {"ram"}
    stowage.onload(model)
    stowage.offload(model, ram=RAM, folder=tmp_path, device_map={"tied": "ram"})  # by either name
    assert tiers(model)["blocks.0.weight"] == "ram"


def test_every_problem_comes_in_one_error(tmp_path: Path) -> None:
    model = made()
    before = model.state_dict()
    with pytest.raises(stowage.InvalidArgument) as caught:
        stowage.offload(
            model,
            ram=1000,
            folder=tmp_path / "a" / "b",
            device="pretend:7",
            device_map={"blocks": "disk", "blocks.1": "ram", "tied": "ram", "none": "vram"},
            reads="quick",
            workers=-1,
        )
    for words in (
        "device must be one that is here, got 'pretend:7' (here: cpu",
        "'blocks' contains 'blocks.1', give one",
        "names must be of modules or parameters, got 'none'",
        "'none' must be in ram or disk, got 'vram'",
        "blocks.0.weight and tied.weight are one tensor, it has two places for it",
        "reads must be one of",
        "workers must be 0 to 256",
        "ram must hold the largest weight, blocks.2.weight of 102400 bytes, got 1000",
    ):
        assert words in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    assert all(
        now is before[name] or now.equal(before[name]) for name, now in model.state_dict().items()
    )


def test_a_refusal_leaves_no_folder_behind(tmp_path: Path) -> None:
    model = made("int8")
    wanted = model(X)
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "new" / "deep", tmp_path / "empty"):
        with pytest.raises(stowage.InvalidArgument, match="must hold the largest weight"):
            stowage.offload(model, ram=27_000, folder=folder)  # but not the pages at its edges
        assert sorted(path.name for path in tmp_path.rglob("*")) == ["empty"]
    stowage.save(model, tmp_path / "saved")
    with pytest.raises(stowage.InvalidArgument, match="must hold the largest weight"):
        stowage.offload(model, ram=27_000, folder=tmp_path / "saved")
    assert (tmp_path / "saved" / "model.safetensors").exists()
    assert torch.equal(model(X), wanted) and set(tiers(model).values()) == {"ram"}


def test_reads_need_a_budget(tmp_path: Path) -> None:
    stowage.save(made(), tmp_path)
    with pytest.raises(stowage.InvalidArgument, match="reads must come with ram"):
        stowage.load(Model, tmp_path, reads="direct")

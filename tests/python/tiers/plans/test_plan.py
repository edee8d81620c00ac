# SPDX-License-Identifier: Apache-2.0
"""`stowage.plan`: plans of models and of files, their JSON, pages and device maps."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import shown
from torch import nn

import stowage
from stowage._tiers.plans.plan import collapsed
from stowage.planning import machine_key

LINKS: dict[str, Any] = {
    "key": "a machine of 4 cores",
    "disk": 2e9,
    "cached": 6e9,
    "memcpy": 1e10,
    "linear": {n: {"read": 8e9, "multiply": 2e11} for n in ("f32", "bf16", "nf4", "int8")},
    "accelerators": {"cuda:0": {"copy": 1.2e10, "read": 4e11, "multiply": 3e13, "assumed": False}},
}
MIB = 1 << 20


class Tied(nn.Module):
    """An embedding that is the head too, layers, a norm, and buffers of both kinds."""

    def __init__(self, layers: int = 6, width: int = 512) -> None:
        super().__init__()
        self.embed = nn.Embedding(1024, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1024, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros(4, dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(512, 512), persistent=False)


def made(model: Any, **options: Any) -> stowage.Plan:
    return stowage.plan(model, links=LINKS, **options)


def test_every_tensor_that_is_saved_has_one_place_and_ties_count_once() -> None:
    model = Tied()
    plan = made(model, ram="5MiB")
    assert {u.name for u in plan.units} == set(model.state_dict()) - {"head.weight"}
    assert plan.predicted.peak["ram"] <= 5 * MIB
    # The head uses the embedding whole.
    assert not next(u for u in plan.units if u.name == "embed.weight").rows


def test_activations_take_room_where_the_work_is() -> None:
    places = {"ram": "64MiB", "accelerator": "4MiB"}
    free, full = made(Tied(), **places), made(Tied(), **places, activations="2MiB")
    there = [sum(u.bytes for u in p.units if u.tier == "cuda:0") for p in (free, full)]
    assert there[1] <= there[0] - MIB and full.predicted.peak["cuda:0"] <= 4 * MIB
    with pytest.raises(stowage.InvalidArgument, match=r"activations \(2.00 MiB\)"):
        made(Tied(), ram="3MiB", activations="2MiB")


def test_an_embedding_alone_gives_rows() -> None:
    plan = made(nn.Sequential(nn.Embedding(4096, 64), nn.Linear(64, 512)), ram="4MiB")
    first = plan.units[0]
    assert (first.name, first.tier, first.rows) == ("0.weight", "disk", True)


def test_a_models_order_is_that_of_its_modules() -> None:
    names = [u.name for u in made(Tied(), ram="64MiB").units]
    assert names.index("embed.weight") < names.index("layers.0.weight") < names.index("norm.weight")
    given = made(Tied(), ram="64MiB", order=["norm.weight"])
    assert given.units[0].name == "norm.weight"


def test_a_resting_model_is_planned_as_it_rests() -> None:
    model = Tied()
    plain = made(model, ram="64MiB")
    planned = made(model, ram="64MiB", storage="nf4")
    with pytest.raises(stowage.InvalidArgument, match="pack or stow them so first"):
        planned.check(model)
    stowage.stow(model, "nf4")
    resting = made(model, ram="64MiB")
    assert resting.facts["model"]["bytes"] < plain.facts["model"]["bytes"] / 3
    assert resting.fingerprint == planned.fingerprint
    planned.check(model)


def test_a_model_on_the_meta_device_is_planned_too() -> None:
    with torch.device("meta"):
        model = Tied(layers=40, width=4096)
    plan = made(model, ram="1GiB", accelerator="1GiB")
    assert plan.facts["model"]["bytes"] > 2 << 30
    assert plan.predicted.peak["cuda:0"] <= 1 << 30


def test_a_saved_model_has_the_plan_of_the_model(tmp_path: Path) -> None:
    model = Tied()
    stowage.stow(model, "int8")
    stowage.save(model, tmp_path / "m")
    plan = made(tmp_path / "m", ram="4MiB")
    plan.check(tmp_path / "m")
    assert plan.predicted.bytes["disk->ram"] >= 0


def test_a_plan_comes_back_from_its_file(tmp_path: Path) -> None:
    plan = made(Tied(), ram="5MiB", accelerator={"cuda:0": "4MiB"})
    plan.save(tmp_path / "plan.json")
    again = stowage.Plan.load(tmp_path / "plan.json")
    assert again.to_json() == plan.to_json()
    assert again.units == plan.units
    again.check(Tied())


def test_a_plan_for_other_weights_is_refused_by_name() -> None:
    plan = made(Tied(), ram="5MiB")
    with pytest.raises(
        stowage.InvalidArgument, match=r"'layers.5.weight' of the plan is not there"
    ):
        plan.check(Tied(layers=5))
    with pytest.raises(stowage.InvalidArgument, match="in the plan"):
        plan.check(Tied().half())


def test_a_plan_for_another_machine_is_refused_by_its_key() -> None:
    with pytest.raises(stowage.InvalidArgument, match="a machine of 4 cores"):
        made(Tied(), ram="5MiB").check_machine()
    here = LINKS | {"key": machine_key()}
    stowage.plan(Tied(), ram="5MiB", links=here).check_machine()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stowage_plan": 2}, "must be 1, got 2"),
        ({"units": None}, "key 'units' must be a list"),
        ({"ring": {"ram": -1}}, "whole number"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    facts = json.loads(made(Tied(), ram="5MiB").to_json()) | change
    (tmp_path / "p.json").write_text(json.dumps(facts))
    with pytest.raises(stowage.BadFile, match=message):
        stowage.Plan.load(tmp_path / "p.json")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(stowage.FileError, match="readable"):
        stowage.Plan.load(tmp_path / "none.json")
    with pytest.raises(stowage.StowageError):
        made(tmp_path / "none.safetensors", ram="1MiB")


def test_a_limit_that_nothing_fits_names_the_number_that_would_do() -> None:
    with pytest.raises(stowage.InvalidArgument, match="ram must be at least") as refused:
        made(Tied(), ram="1MiB")
    found = re.search(r"at least (\d+) bytes", str(refused.value))
    assert found
    assert made(Tied(), ram=int(found[1])).predicted.peak["ram"] <= int(found[1])


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(stowage.InvalidArgument, match="a model or a path"):
        made(3, ram="1MiB")
    with pytest.raises(stowage.InvalidArgument, match="must match a weight"):
        made(Tied(), ram="9MiB", uses={"*nobody*": 1})
    with pytest.raises(stowage.InvalidArgument, match="order must name weights"):
        made(Tied(), ram="9MiB", order=["nobody"])
    with pytest.raises(stowage.InvalidArgument, match="none until its module"):
        made(nn.LazyLinear(3), ram="9MiB")


def test_a_device_map_covers_every_weight_once() -> None:
    model = Tied()
    plan = made(model, ram="8MiB", accelerator="3MiB")
    places = plan.device_map()
    for unit in plan.units:
        hits = [
            p for n, p in places.items() if n in ("", unit.name) or unit.name.startswith(n + ".")
        ]
        assert hits == [{"ram": "cpu"}.get(unit.tier, unit.tier)], unit.name


def test_places_collapse_into_modules() -> None:
    assert collapsed({"a.x": "ram", "a.y": "ram", "b.x": "disk"}) == {"a": "ram", "b": "disk"}
    assert collapsed({"a.x": "ram", "b.x": "ram"}) == {"": "ram"}
    assert collapsed({"a.x": "ram", "a.b.y": "disk", "w": "ram"}) == {
        "a.x": "ram",
        "a.b": "disk",
        "w": "ram",
    }


def test_a_page_needs_nothing_else(tmp_path: Path) -> None:
    plan = made(Tied(), ram="5MiB", accelerator="4MiB")
    seconds = plan.predicted.seconds * 1.1
    plan.html(tmp_path / "p.html", seconds=seconds, peak={"ram": 4 * MIB}, bytes={"disk->ram": 9})
    page = (tmp_path / "p.html").read_text()
    for word in (
        "Memory over the pass",
        "Bytes by tier",
        "Bytes by storage",
        "measured",
        "+10.0 %",
    ):
        assert word in page
    assert not re.search(r"https?:|<script|@import|url\(|src=", page)
    assert "prefers-color-scheme:dark" in page
    plan.html(tmp_path / "p.html")
    assert "Predicted beside measured" not in (tmp_path / "p.html").read_text()


@pytest.mark.slow
def test_a_browser_shows_the_page(tmp_path: Path) -> None:
    plan = made(Tied(), ram="5MiB", accelerator="4MiB")
    plan.html(tmp_path / "p.html", seconds=1e-3)
    seen = shown(tmp_path / "p.html")
    assert seen.fits and seen.is_drawn() and not seen.complaints
    assert "Predicted beside measured" in seen.headings()


def test_the_text_says_which_and_why() -> None:
    text = str(made(Tied(), ram="5MiB"))
    for word in ("Tied:", "limits", "predicted", "peak", "layers.3.weight", "ahead of its work"):
        assert word in text

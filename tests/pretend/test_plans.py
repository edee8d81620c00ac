# SPDX-License-Identifier: Apache-2.0
"""Plans with an accelerator, carried out on the pretend device: what stays there is copied once,
what moves as planned, and the limit holds."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from expert_models import IDS, build
from pretend_device import counted, counters
from torch import nn

import stowage
from stowage.planning import machine_key

X = torch.linspace(-1, 1, 2 * 384).reshape(2, 384)
LAYERS = 10


def links() -> dict[str, object]:
    cpu = {"read": 1e9, "multiply": 1e10}  # slow, so that all work is on the device
    fast = {"copy": 1e10, "read": 1e12, "multiply": 1e13, "assumed": False}
    return {
        "key": machine_key(),
        "disk": 2e9,
        "cached": 4e9,
        "memcpy": 8e9,
        "linear": {name: cpu for name in ("int8", "f32")},
        "accelerators": {"pretend:0": fast},
    }


def made() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(384, 384) for _ in range(LAYERS))).eval()
    stowage.stow(model.requires_grad_(False), "int8")
    return model


def planned(model: nn.Module, room: float, ram: str = "1GiB") -> stowage.Plan:
    """With room on the device for so many layers beside small tensors and the tile."""

    def within(limit: int) -> stowage.Plan:
        given = {"accelerator": {"pretend:0": limit}, "rows": 2, "works_on_cpu": False}
        return stowage.plan(model, ram=ram, links=links(), **given)

    roomy = within(1 << 30)
    sizes = [unit.bytes for unit in roomy.units if not unit.stays]
    return within(roomy.predicted.peak["pretend:0"] - sum(sizes) + int(room * sizes[0]))


@pytest.mark.parametrize("disk", [False, True])
def test_a_plan_with_a_device_is_kept(disk: bool, tmp_path: Path) -> None:
    model = made()
    wanted = made()
    folder = {"folder": tmp_path / "w"} if disk else {}
    plan = planned(model, 6, ram="400KiB" if disk else "1GiB")
    there = plan.names("pretend:0")
    assert 0 < len(there) < LAYERS
    assert bool(plan.names("disk")) == disk
    limit = plan.facts["limits"]["accelerators"]["pretend:0"]
    with counted(lazy=True), torch.no_grad():
        expected = wanted.to("pretend:0")(X.to("pretend:0")).cpu()
        del wanted
        before = counters().held
        stowage.offload(model, plan=plan, **folder)
        for _ in range(3):
            assert torch.equal(model(X), expected)
        moved = stowage.engine_report(model)
        assert torch.equal(model(X), expected)
        once = stowage.engine_report(model).since(moved)
        assert once.device is not None
        one = 384 * 384 + 384 * 4
        assert once.device.bytes_copied <= (LAYERS - len(there) + 1) * (one + 2048)
        assert counters().peak - before <= limit + 4 * X.nbytes + (2 << 20)
        stowage.onload(model)
        assert torch.equal(model(X), made()(X))


@pytest.mark.parametrize("room", ["1500KiB", "8MiB"])
def test_a_plan_of_a_mixture_is_kept(room: str, tmp_path: Path) -> None:
    """With room for a part of the experts, and for all of them: then they are there for good, and
    only the rows of the embedding are on the disk."""
    torch.manual_seed(0)
    model = build("Qwen3Moe").float()
    stowage.stow(model, "int8:row2")
    model.set_experts_implementation("eager")
    plan = stowage.plan(
        model, ram="1300KiB", accelerator={"pretend:0": room}, rows=12, links=links()
    )
    with torch.no_grad():
        wanted = copy.deepcopy(model).to("pretend:0")(IDS.to("pretend:0")).logits.cpu()
        with counted():
            stowage.offload(model, plan=plan, folder=tmp_path)
            for _ in range(2):
                assert torch.allclose(model(IDS).logits.cpu(), wanted, atol=1e-5)
            told = stowage.engine_report(model)
            assert told.device is not None and told.device.peak <= told.device.ring
            assert (told.device.ring == 0) == (room == "8MiB")
            assert told.peak <= plan.predicted.peak["ram"] + (1 << 16)


def test_experts_that_are_used_most_stay_on_the_device(tmp_path: Path) -> None:
    """Of every stack a few, as the plan says; whatever else is used is fetched, and nothing is
    multiplied elsewhere."""
    torch.manual_seed(0)
    model = build("Qwen3Moe").float()
    stowage.stow(model, "int8:row2")
    model.set_experts_implementation("eager")
    layers = {f"model.layers.{i}.mlp.experts.gate_up_proj": [500, 1, 500, 1] for i in range(2)}
    facts = {name: {"hits": 1, "by_index": counts} for name, counts in layers.items()}
    (tmp_path / "uses.json").write_text(json.dumps({"stowage_uses": 1, "weights": facts}))

    def within(room: str, ram: str) -> stowage.Plan:
        given = {"accelerator": {"pretend:0": room}, "rows": 1, "links": links()}
        return stowage.plan(model, ram=ram, routed=2, uses=tmp_path / "uses.json", **given)

    plan = within("1200KiB", "1300KiB")
    experts = {unit.name: unit for unit in plan.units if "experts" in unit.name}
    assert {unit.tier for unit in experts.values()} == {"disk", "ram", "pretend:0"}
    assert {n[-3:] for n, unit in experts.items() if unit.tier != "disk"} == {"[0]", "[2]"}
    assert {unit.work for unit in experts.values()} == {"pretend:0"}
    with torch.no_grad():
        wanted = copy.deepcopy(model).to("pretend:0")(IDS.to("pretend:0")).logits.cpu()
        for room in ("1300KiB", "16MiB"):
            carried, moved = within("1200KiB", room), copy.deepcopy(model)
            limit = carried.facts["limits"]["accelerators"]["pretend:0"]
            with counted():
                before = counters().held
                stowage.offload(moved, plan=carried, folder=tmp_path / room)
                for _ in range(3):
                    assert torch.allclose(moved(IDS).logits.cpu(), wanted, atol=1e-5)
                told = stowage.engine_report(moved)
                assert told.device is not None and 0 < told.device.peak <= told.device.ring
                assert counters().peak - before <= limit + (1 << 20)
                assert told.peak <= carried.predicted.peak["ram"] + (1 << 16)
                stowage.onload(moved)
                del moved


class Picked(nn.Module):
    """Products with one matrix of a stack."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Module()
        self.experts.w = nn.Parameter(torch.randn(8, 128, 384))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return nn.functional.linear(x, self.experts.w[which])


@pytest.mark.parametrize("ram", ["2MiB", "700KiB"])
def test_matrices_that_stay_on_the_device_rest_below_it(ram: str, tmp_path: Path) -> None:
    """In memory, where it has room for them beside the others; else in a file."""
    torch.manual_seed(0)
    model = Picked().requires_grad_(False)
    given = {"accelerator": {"pretend:0": "700KiB"}, "works_on_cpu": False, "links": links()}
    plan = stowage.plan(model, ram=ram, routed=1, **given)
    tiers = {unit.tier for unit in plan.units}
    assert tiers >= {"pretend:0", "ram"} and all(unit.name[-1] == "]" for unit in plan.units)
    with torch.no_grad(), counted():
        wanted = [model(X, i) for i in range(8)]
        if ram == "700KiB":
            with pytest.raises(stowage.InvalidArgument, match="folder must come with a plan"):
                stowage.offload(model, plan=plan)
        stowage.offload(model, plan=plan, **({} if ram == "2MiB" else {"folder": tmp_path}))
        for _ in range(2):
            for i in range(8):
                assert torch.allclose(model(X, i).cpu(), wanted[i], atol=1e-3)
        told = stowage.engine_report(model)
        assert told.device is not None and told.device.peak <= 700 << 10

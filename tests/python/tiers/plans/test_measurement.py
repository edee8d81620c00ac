# SPDX-License-Identifier: Apache-2.0
"""What passes took is counted pass by pass, and a plan says how it lies beside it."""

from __future__ import annotations

import dataclasses
import gc
import json
import mmap
from pathlib import Path

import pytest
import torch
from browser import shown
from torch import nn

import stowage

MIB = 1 << 20
LINKS = {
    "key": "a machine of 4 cores",
    "disk": 2e9,
    "cached": 6e9,
    "memcpy": 1e10,
    "linear": {"f32": {"read": 8e9, "multiply": 2e11}, "int8": {"read": 8e9, "multiply": 2e11}},
    "accelerators": {},
}


def model_of(layers: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(layers)]).eval()
    stowage.stow(model, "int8")
    return model


def test_passes_are_counted_and_only_those_of_the_block(tmp_path: Path) -> None:
    model, x = model_of(), torch.ones(1, 512)
    stowage.offload(model, ram="1MiB", folder=tmp_path / "w", reads="buffered")
    with torch.inference_mode():
        model(x)
        before = stowage.engine_report(model)
        with stowage.measured(model) as taken:
            for _ in range(3):
                model(x)
        inside = stowage.engine_report(model).since(before)
        model(x)
    assert len(taken.passes) == 3 and taken.seconds == sorted(taken.passes)[1] > 0
    # The middle pass beside the mean: reads ahead count in the pass that began them, so a pass may
    # have up to a ring more than the next.
    assert abs(taken.bytes["disk->ram"] - inside.bytes_read / 3) <= MIB
    assert taken.bytes["disk->ram"] > 4 * 256 << 10
    biases = 6 * 512 * 4
    assert taken.peak == {"ram": inside.peak + biases}
    assert 0 <= taken.stall <= sum(taken.passes) / 3 * 1.5  # both are means
    assert "3 passes" in str(taken)
    with torch.inference_mode(), stowage.measured(model) as none:
        pass
    assert none.passes == [] and none.seconds == 0
    assert len(model._forward_hooks) == 0, "the hooks are gone"


def test_the_growth_of_the_process_is_seen(tmp_path: Path) -> None:
    model = model_of(2)
    stowage.offload(model, ram="1MiB", folder=tmp_path / "w")
    gc.collect()  # what other tests left would go meanwhile
    with stowage.measured(model) as taken:
        # Not by malloc, which may have as much left of what was freed before.
        room = mmap.mmap(-1, 64 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        torch.frombuffer(room, dtype=torch.uint8).fill_(1)
    assert 60 * MIB < taken.process < 100 * MIB


def test_figures_are_saved_as_the_program_reads_them(tmp_path: Path) -> None:
    model = model_of(2)
    stowage.offload(model, ram="1MiB", folder=tmp_path / "w")
    with torch.inference_mode(), stowage.measured(model) as taken:
        model(torch.ones(1, 512))
    taken.save(tmp_path / "m.json")
    read = json.loads((tmp_path / "m.json").read_text())
    assert read == taken.figures()
    assert {"seconds", "peak", "bytes", "stall"} <= set(read)
    with pytest.raises(stowage.FileError, match="must be writable"):
        taken.save(tmp_path / "none" / "m.json")


def test_a_model_that_is_not_offloaded_is_refused() -> None:
    with pytest.raises(stowage.InvalidArgument, match="must be offloaded"):
        stowage.measured(nn.Linear(2, 2)).__enter__()


def test_a_plan_is_compared(tmp_path: Path) -> None:
    model = model_of()
    plan = stowage.plan(model, ram="2MiB", links=LINKS)
    took = {"seconds": plan.predicted.seconds * 1.09, "bytes": plan.predicted.bytes}
    near = plan.compare(took)
    assert str(near).endswith("(+9 %)") and near.off == pytest.approx(0.09)
    far = plan.compare(took | {"seconds": plan.predicted.seconds * 5, "stall": 0.0})
    assert "(+400 %): work took" in str(far) and "attention, norms and Python" in str(far)
    stalled = plan.compare(took | {"seconds": 1.0, "stall": 0.99})
    assert "waits for weights took" in str(stalled) and "planned 2.00 GB/s" in str(stalled)
    with pytest.raises(stowage.InvalidArgument, match="seconds of a pass must be above 0"):
        plan.compare({"seconds": 0})

    stowage.offload(model, ram="1MiB", folder=tmp_path / "w")
    with torch.inference_mode(), stowage.measured(model) as taken:
        model(torch.ones(1, 512))
    said = plan.compare(taken)
    assert said.measured == taken.seconds and "predicted" in str(said)
    plan.html(tmp_path / "p.html", measured=taken)
    assert "Predicted beside measured" in (tmp_path / "p.html").read_text()


def test_a_report_becomes_a_page(tmp_path: Path) -> None:
    model = model_of()
    plan = stowage.plan(model, ram="2MiB", links=LINKS)
    stowage.report(model).html(tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    for word in ("Report of Sequential", "int8:row", "0.weight", "relative", "Bytes by kind"):
        assert word in page
    assert "Memory over the pass" not in page and "reads:" not in page
    stowage.offload(model, ram="1MiB", folder=tmp_path / "w")
    with torch.inference_mode(), stowage.measured(model) as taken:
        model(torch.ones(1, 512))
    report = stowage.report(model)
    assert report.engine is not None and report.engine in str(report)
    report.html(tmp_path / "r.html", plan=plan, measured=taken)
    page = (tmp_path / "r.html").read_text()
    for word in ("Memory over the pass", "Predicted beside measured", " reads: ", "disk"):
        assert word in page
    with pytest.raises(stowage.FileError, match="must be writable"):
        report.html(tmp_path / "none" / "r.html")


def test_a_page_of_an_error_that_is_not_finite(tmp_path: Path) -> None:
    row = stowage.report(model_of(1)).rows[0]
    told = stowage.Report((dataclasses.replace(row, max_error=float("inf")),), 0, {})
    told.html(tmp_path / "r.html")
    assert "0.weight" in (tmp_path / "r.html").read_text()


@pytest.mark.slow
def test_a_browser_shows_the_page(tmp_path: Path) -> None:
    model = model_of()
    plan = stowage.plan(model, ram="2MiB", links=LINKS)
    stowage.report(model).html(tmp_path / "r.html", plan=plan, measured={"seconds": 1e-3})
    seen = shown(tmp_path / "r.html")
    assert seen.fits and seen.is_drawn() and not seen.complaints
    assert "Predicted beside measured" in seen.headings()

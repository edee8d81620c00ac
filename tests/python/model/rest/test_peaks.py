# SPDX-License-Identifier: Apache-2.0
"""The peak of memory follows its formula (docs/working.md), counted by torch's allocator and our
pool; the benchmark that prints it runs."""

import functools
import json
from pathlib import Path

import fresh
import pytest
import torch
from granularity import (
    MODES,
    PHASES,
    TILE,
    Attention,
    Case,
    Convolutions,
    expected,
    peaks,
    working_set,
)
from peaks import Peak

import stowage
from stowage._ops.library import composite_forced

pytestmark = pytest.mark.skipif(composite_forced(), reason="the pool belongs to the kernels")
SCRIPT = Path(__file__).resolve().parents[4] / "bench/python/granularity.py"
CASES = {
    # fp32 and 128 rows take tiles on every instruction set.
    "attention": lambda: Case("attention", Attention, 1024, 2, torch.randn(128, 1024)),
    # A tile and its piece of the result are 4 MiB: 256 x (448 x 9 + 64) x 4 bytes.
    "convolution": lambda: Case("", Convolutions, 448, 2, torch.randn(1, 448, 8, 8)),
}
NAMES = [pytest.param("attention", marks=pytest.mark.slow), "convolution"]


@functools.cache
def counted(name: str) -> tuple[Case, dict[str, dict[str, Peak]], dict[str, int]]:
    case = CASES[name]()
    # oneDNN's convolution copies its weight, torch's own does not: there the formula is exact.
    with torch.backends.mkldnn.flags(enabled=name == "attention"):
        models = {mode: case.model(mode, "int8") for mode in MODES}
        found = {mode: peaks(case, model) for mode, model in models.items()}
    return case, found, {m: stowage.report(model).rest_bytes for m, model in models.items()}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("mode", ["tile", "layer", "block"])
@pytest.mark.parametrize("name", NAMES)
def test_the_peak_is_that_of_the_formula(name: str, mode: str, phase: str) -> None:
    case, found, _ = counted(name)
    wanted, got = expected(case, mode, phase, found["dense"][phase]), found[mode][phase].total
    assert got <= 1.01 * wanted
    # A product's tiles take what its rows need, and convolution's backward widens and multiplies in
    # turn: 4 MiB are the most of both.
    if mode != "tile" or (name == "convolution" and phase != "backward"):
        assert got >= 0.99 * wanted


@pytest.mark.parametrize("name", NAMES)
def test_tiles_are_4_mib_and_rest_is_a_quarter(name: str) -> None:
    case, found, rest = counted(name)
    dense, tile = (found[mode]["inference"] for mode in ("dense", "tile"))
    assert tile.total <= dense.anywhere + TILE
    assert working_set(case, "layer", "inference") > TILE
    assert rest["tile"] == rest["block"] < 0.26 * rest["dense"]


@pytest.mark.parametrize("mode", ["tile", "layer", "block"])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_widened_is_held_for_backward(name: str, mode: str) -> None:
    _, found, _ = counted(name)
    dense, ours = found["dense"], found[mode]
    assert ours["inference"].held == dense["inference"].held  # the result
    assert abs(ours["forward"].held - dense["forward"].held) <= 0.01 * dense["forward"].held
    assert abs(ours["backward"].held - dense["backward"].held) <= 0.01 * dense["forward"].held


@pytest.mark.slow
def test_the_bench_runs_in_a_short_form() -> None:
    small = ["--width", "256", "--tokens", "64", "--blocks", "1", "--rounds", "1", "--json"]
    ran = fresh.script(SCRIPT, *small)
    assert ran.returncode == 0, ran.stderr
    rows = {(row["model"], row["mode"]): row for row in json.loads(ran.stdout)}
    assert len(rows) == 8
    for (model, mode), row in rows.items():
        assert row["rest"] <= (1.0 if mode == "dense" else 0.52) * rows[model, "dense"]["rest"]
        assert row["peak_of_expected"] <= 1.01 and row["ms"] > 0
        assert abs(row["saved_beyond_dense"]) <= 0.01 * row["rest"]

# SPDX-License-Identifier: Apache-2.0
"""The benchmark of experts within a budget runs, and its policies are what their names say."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import fresh
import pytest

from stowage._ops.library import composite_forced

pytest.importorskip("transformers")
SCRIPT = Path(__file__).resolve().parents[2] / "bench/python/experts.py"
sys.path.insert(0, str(SCRIPT.parent))

import experts  # noqa: E402

USES = [(0, e) for e in (1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2, 4)]


def test_policies_read_what_can_be_counted_by_hand() -> None:
    assert experts.optimum(USES, 4) == 4
    assert experts.optimum(USES, 3) == 6  # 3 and 4 in turn, beside 1 and 2
    assert experts.by(USES, 3, lambda _, i, __: i) == 6
    assert experts.by(USES, 3, lambda use, _, counts: counts[use]) == 6
    assert experts.by(USES, 2, lambda _, i, __: i) == 12
    assert experts.optimum(USES, 2) < 12
    assert experts.lookahead(USES, 3, span=12) == experts.optimum(USES, 3)
    assert experts.lookahead(USES, 3, span=0) == 6
    assert experts.optimum(USES, 2) <= experts.lookahead(USES, 2, span=3) <= 12


@pytest.mark.skipif(composite_forced(), reason="engines belong to the kernels")
def test_the_bench_runs_in_a_short_form() -> None:
    small = ["--layers", "2", "--experts", "8", "--width", "256", "--inner", "128"]
    ran = fresh.script(SCRIPT, *small, "--tokens", "12", "--json")
    assert ran.returncode == 0, ran.stderr
    rows = json.loads(ran.stdout)
    assert [row["share"] for row in rows] == [0.25, 0.5]
    for row in rows:
        assert row["uses"] == 12 * 2 * 4
        assert row["peak_of_ram"] <= 1.0 and row["of_resident"] > 0
        assert 0 <= row["bound"]["optimum"] <= min(row["bound"].values())
        assert 0 <= row["reads"] <= row["uses"]
        predicted, was = row["planned"]["hits"]
        assert 0 < predicted <= 1 and was > predicted - 0.3
        assert all(0 <= reads <= 10 * 2 * 4 for reads in row["first_reads"])


@pytest.mark.skipif(composite_forced(), reason="engines belong to the kernels")
def test_what_a_budget_costs_runs_in_a_short_form() -> None:
    small = ["--layers", "2", "--experts", "8", "--ways", "grouped_mm", "--rounds", "2", "--json"]
    ran = fresh.script(SCRIPT.with_name("experts_overhead.py"), *small)
    assert ran.returncode == 0, ran.stderr
    (row,) = json.loads(ran.stdout)
    assert row["memory"] > 0 and row["more"] == row["within"] - row["memory"]

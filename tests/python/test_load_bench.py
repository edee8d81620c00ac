# SPDX-License-Identifier: Apache-2.0
"""bench/python/load.py in a short form: every storage loads."""

import json
from pathlib import Path

import fresh
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "bench/python/load.py"


@pytest.mark.slow
def test_the_load_bench_runs_in_a_short_form(tmp_path: Path) -> None:
    small = ["--gigabytes", "0.02", "--rounds", "1", "--threads", "1", "--folder", str(tmp_path)]
    ran = fresh.script(SCRIPT, *small, "--json")
    assert ran.returncode == 0, ran.stderr
    rows = json.loads(ran.stdout)
    assert [row["name"] for row in rows][:2] == ["plain", "bf16"] and len(rows) == 10
    assert all(row["seconds"] > 0 and row["ratio"] > 0 for row in rows)

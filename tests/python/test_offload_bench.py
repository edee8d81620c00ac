# SPDX-License-Identifier: Apache-2.0
"""bench/python/offload.py, in a short form: it computes, and the process keeps to the budget."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "bench/python/offload.py"


@pytest.mark.slow
def test_the_offload_bench_runs_in_a_short_form(tmp_path: Path) -> None:
    small = ["--layers", "8", "--width", "2048", "--rounds", "1", "--folder", str(tmp_path)]
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), *small, "--json"], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    rows = {row["name"]: row for row in json.loads(ran.stdout)}
    assert len(rows) == 9
    ratios = [row["figure"] for name, row in rows.items() if not name.startswith("us added")]
    assert all(figure > 0 for figure in ratios), "a difference of two times may be below 0"
    assert rows["memory, of what three layers take"]["figure"] < 1.25  # of 12 MiB, with the heap

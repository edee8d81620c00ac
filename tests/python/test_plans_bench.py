# SPDX-License-Identifier: Apache-2.0
"""bench/python/plans.py on its smallest model: what a plan reads is what is read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "bench/python/plans.py"


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    around = {**os.environ, "HF_HUB_OFFLINE": "1", "STOWAGE_LINKS": str(folder / "links.json")}
    command = [sys.executable, str(SCRIPT), "--folder", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=around)


@pytest.mark.nightly
def test_the_smallest_model(tmp_path: Path) -> None:
    done = run(tmp_path, "--only", "minilm", "--passes", "2", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout[done.stdout.index("[") :])
    assert [row["share"] for row in rows] == [1.0, 0.6, 0.3]
    assert [row["ram"] for row in rows] == sorted((row["ram"] for row in rows), reverse=True)
    for row in rows:
        assert abs(row["read"] - row["read_predicted"]) <= 0.25 * row["read_predicted"] + (1 << 20)
        assert row["seconds_measured"] > 0 and row["peak_measured"] > 0


@pytest.mark.slow
def test_a_name_that_no_model_has_is_an_error(tmp_path: Path) -> None:
    done = run(tmp_path, "--only", "MiniLM")
    assert done.returncode == 2 and "--only must be part of one of" in done.stderr

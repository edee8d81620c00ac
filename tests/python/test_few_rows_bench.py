# SPDX-License-Identifier: Apache-2.0
"""bench/python/few_rows.py in a short form: a line for each storage and number of rows."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "bench/python/few_rows.py"
SHORT = ["--size", "256", "--rows", "1", "5", "--storages", "nf4", "q4_k", "--rounds", "1"]


def run(*more: str) -> str:
    return subprocess.check_output([sys.executable, str(SCRIPT), *SHORT, *more], text=True)


def test_each_storage_has_its_lines() -> None:
    lines = json.loads(run("--json"))
    assert [(line["rows"], line["storage"]) for line in lines] == [
        (rows, name) for rows in (1, 5) for name in ("dense bf16", "nf4", "q4_k")
    ]
    assert all(line["ms"] > 0 and line["read"] > 0 for line in lines)


def test_gradients_and_dtypes_have_theirs() -> None:
    lines = json.loads(run("--json", "--dtype", "fp32", "--gradient"))
    assert {line["storage"] for line in lines} == {"dense fp32", "nf4", "q4_k"}
    assert all(line["ms"] > 0 for line in lines)


def test_the_table_shows_them() -> None:
    head, limit, *rows = run().splitlines()
    assert head.split() == ["rows", "dense", "bf16", "nf4", "q4_k"]
    assert limit.startswith("read") and [row.split()[0] for row in rows] == ["1", "5"]

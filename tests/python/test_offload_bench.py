# SPDX-License-Identifier: Apache-2.0
"""bench/python/offload.py, in a short form: it computes, and the process keeps to the budget."""

import json
import math
import re
from pathlib import Path

import fresh
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "bench/python/offload.py"


HALF = "half in memory, warm, of all in memory"
READ = "us added to a use that is read, beyond the copy"
NAMES = {
    "cold, of O_DIRECT",
    "memory, of what three layers take",
    "warm, of all in memory",
    "warm, beside torch.sum of the same bytes",
    HALF,
    "three layers in memory, warm, of all in memory",
    "us to map and unmap a cached page",
    "a report of each pass",
    "inside a trace",
    "us added to a use in memory",
    READ,
}


def numbers(pattern: str, text: str) -> tuple[float, ...]:
    found = re.search(pattern, text)
    assert found, text
    return tuple(map(float, found.groups()))


@pytest.mark.slow
def test_the_offload_bench_runs_in_a_short_form(tmp_path: Path) -> None:
    small = ["--layers", "8", "--width", "2048", "--rounds", "1", "--folder", str(tmp_path)]
    ran = fresh.script(SCRIPT, *small, "--json")
    assert ran.returncode == 0, ran.stderr
    rows = {row["name"]: row for row in json.loads(ran.stdout)}
    assert set(rows) == NAMES
    for name, row in rows.items():
        assert math.isfinite(row["figure"]), name
        if not name.startswith("us added"):  # a difference of two times may be below 0
            assert row["figure"] > 0, name
    # What is counted holds on any machine: bytes, and where weights were found.
    assert rows["memory, of what three layers take"]["figure"] < 1.25  # of 12 MiB, with the heap
    held, size = numbers(r"held at most (\d+) MiB of (\d+)", rows[HALF]["detail"])
    assert 0 < held <= size / 2 and size >= 8 * 4, "8 layers of 4 MiB"
    kib, there = numbers(r"to copy (\d+) KiB, (\d+)% were there", rows[READ]["detail"])
    assert 64 <= kib < 80 and there <= 100, "a layer of 256 x 256 codes"
    (waiting,) = numbers(r"(\d+)% of it waiting", rows["cold, of O_DIRECT"]["detail"])
    assert waiting <= 100

# SPDX-License-Identifier: Apache-2.0
"""bench/python/decoder.py, in a short form: every form computes and takes what it should, and
README.md holds a table that it printed."""

import argparse
import json
import math
import os
import re
import runpy
from pathlib import Path

import fresh
import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench/python/decoder.py"
SMALL = [
    "--layers",
    "2",
    "--hidden",
    "256",
    "--words",
    "64",
    "--tokens",
    "16",
    "--rounds",
    "1",
    "--no-peers",
]
ERRORS = {  # of logits, on random weights; twice what was seen
    "stowage f8_e4m3": 0.16,
    "stowage f8_e4m3:row": 0.12,
    "stowage int8:row": 0.04,
    "stowage nf4": 0.45,
    "stowage nf4:block64:nested": 0.45,
}


@pytest.mark.slow
def test_the_decoder_bench_runs_in_a_short_form() -> None:
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    ran = fresh.script(SCRIPT, *SMALL, "--json", env=env)
    assert ran.returncode == 0, ran.stderr
    rows = {row["name"]: row for row in json.loads(ran.stdout[ran.stdout.index("[") :])}
    dense = rows["dense bf16"]
    for name, limit in ERRORS.items():
        assert 0 < rows[name]["relative_error"] < limit, name
        assert rows[name]["decode_ms"] > 0
        # Embedding, head and norms stay bf16: what rests is at most half of the other bytes.
        plain = 2 * 64 * 256 * 2
        assert rows[name]["rest_bytes"] - plain <= 0.51 * (dense["rest_bytes"] - plain) + 4096


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.slow
def test_the_readme_holds_what_the_decoder_bench_prints() -> None:
    bench = runpy.run_path(str(SCRIPT))
    given = argparse.Namespace(threads=1, tokens=128, layers=24, hidden=2048, rounds=3)
    one = bench["Row"]("stowage nf4", 1 << 30, 1.0, 1.0, 1.0, 1.0, 0.5)
    where, _, *printed = bench["table"]([one], given)
    part = (ROOT / "README.md").read_text().split("\n## How fast\n", 1)[1].split("\n## ", 1)[0]
    about, machine, table, *more = part.strip().split("\n\n")
    assert "bench/python/decoder.py" in about and "|" not in "".join(more)
    a_cpu = r".+ \(family \d+, model \d+; `\w+`\), one thread, torch 2\S+.*; 24 layers of 2048, .+:"
    assert re.fullmatch(a_cpu, where) and re.fullmatch(a_cpu, machine)
    assert table.splitlines()[:2] == printed[:2] and len(cells(printed[2])) == 8
    rows = {row[0]: [float(cell) for cell in row[1:]] for row in map(cells, table.splitlines()[2:])}
    dense = rows["dense bf16"]
    assert {f"`{s}`" for s in bench["STORAGES"]} < rows.keys()
    for name, (mib, share, ms, speed, many_ms, many_speed, _) in rows.items():
        assert abs(share - mib / dense[0]) < 0.006, name
        assert math.isclose(speed, dense[2] / ms, rel_tol=0.03, abs_tol=0.01), name
        assert math.isclose(many_speed, dense[4] / many_ms, rel_tol=0.03, abs_tol=0.01), name

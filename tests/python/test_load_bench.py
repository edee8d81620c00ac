# SPDX-License-Identifier: Apache-2.0
"""bench/python/load.py and load_dialects.py in a short form: every storage loads, and files of a
dialect do, parts in order of the file or not."""

import json
from pathlib import Path

import fresh
import pytest

BENCHES = Path(__file__).resolve().parents[2] / "bench/python"


@pytest.mark.nightly
def test_the_load_bench_runs_in_a_short_form(tmp_path: Path) -> None:
    small = ["--gigabytes", "0.02", "--rounds", "1", "--threads", "1", "--folder", str(tmp_path)]
    ran = fresh.script(BENCHES / "load.py", *small, "--json")
    assert ran.returncode == 0, ran.stderr
    rows = json.loads(ran.stdout)
    assert [row["name"] for row in rows][:2] == ["plain", "bf16"] and len(rows) == 10
    assert all(row["seconds"] > 0 and row["ratio"] > 0 for row in rows)


GGUF = pytest.param("gguf Q8_0", marks=pytest.mark.nightly)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["fp8 f8_e4m3:block128x128", GGUF])
def test_the_bench_of_dialects_runs_in_a_short_form(case: str, tmp_path: Path) -> None:
    small = ["--gigabytes", "0.01", "--rounds", "1", "--threads", "1", "--folder", str(tmp_path)]
    only = ["--only", case.partition(" ")[2]]
    ran = fresh.script(BENCHES / "load_dialects.py", *small, *only, "--json")
    assert ran.returncode == 0, ran.stderr
    (row,) = json.loads(ran.stdout)
    assert row["name"] == case and row["seconds"] > 0 and row["ratio"] > 0


@pytest.mark.nightly
def test_the_bench_of_from_pretrained_runs_in_a_short_form(tmp_path: Path) -> None:
    small = ["--layers", "1", "--width", "256", "--rounds", "1", "--folder", str(tmp_path)]
    ran = fresh.script(BENCHES / "pretrained.py", *small, "--only", "from_pretrained", "--json")
    assert ran.returncode == 0, ran.stderr
    rows = json.loads(ran.stdout)
    assert [row["way"] for row in rows] == ["stowage.load", "from_pretrained"]
    assert rows[0]["rest"] == rows[1]["rest"] and all(row["seconds"] > 0 for row in rows)


@pytest.mark.nightly
def test_the_bench_of_spread_models_runs_in_a_short_form(tmp_path: Path) -> None:
    small = ["--gigabytes", "0.2", "--ranks", "4", "--only", "gptq", "--folder", str(tmp_path)]
    ran = fresh.script(BENCHES / "sharded_load.py", *small, "--json")
    assert ran.returncode == 0, ran.stderr
    (row,) = json.loads(ran.stdout)
    assert row["rows"]["read"] < 0.27 < 1 <= row["whole"]["read"]
    assert row["rows"]["memory"] < 0.45 < 1 < row["whole"]["memory"]

# SPDX-License-Identifier: Apache-2.0
"""bench/python/experts_lora.py in a short form: both ways take a step."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")
SCRIPT = Path(__file__).resolve().parents[2] / "bench/python/experts_lora.py"


@pytest.mark.slow
def test_both_ways_take_a_step() -> None:
    small = ["--layers", "1", "--experts", "8", "--width", "256", "--inner", "128", "--rounds", "1"]
    command = [sys.executable, SCRIPT, *small, "--tokens", "5", "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    lines = json.loads(done.stdout)
    assert [line["way"] for line in lines] == ["plain sum", "factors"]
    assert all(line["seconds"] > 0 and line["bytes"] >= 0 for line in lines)

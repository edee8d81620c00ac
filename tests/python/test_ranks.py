# SPDX-License-Identifier: Apache-2.0
"""Runs on several ranks end, whatever a rank does, and say where each one was."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import at_odds, broken_off, on_ranks

BENCH = Path(__file__).parents[2] / "bench/python/sharded_training.py"


@pytest.mark.slow
def test_ranks_that_wait_for_each_other_end_and_say_where() -> None:
    with pytest.raises(AssertionError) as raised:
        on_ranks(2, at_odds, seconds=4)
    first, second = str(raised.value).split("--- rank 1: ")
    assert "ended, exit code 1; it was at" in first and "line" in first
    assert "it was at" in second or "Traceback" in second


def test_a_rank_that_a_signal_ends_says_where() -> None:
    with pytest.raises(AssertionError) as raised:
        on_ranks(2, broken_off)
    first, second = str(raised.value).split("--- rank 1: ")
    assert "ended, exit code -11; it was at" in second and "in broken_off" in second
    assert "Traceback" in first


@pytest.mark.nightly
def test_the_benchmark_of_sharded_training() -> None:
    command = [sys.executable, str(BENCH), "--width", "64", "--rounds", "1", "--json"]
    run = subprocess.run(command, check=True, timeout=280, capture_output=True, env=os.environ)
    found = json.loads(run.stdout)
    assert found["step"]["fp8"]["gathered"] < 0.52 * found["step"]["bf16"]["gathered"]
    assert found["refresh"]["ours"]["calls"] == 1
    assert all(abs(row["off"]) < 0.01 for row in found["peak"].values())

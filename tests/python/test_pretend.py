# SPDX-License-Identifier: Apache-2.0
"""The tests of tests/pretend, in a process that has one more device. (One for all: importing torch
and building the device takes longer than most of them.)"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "pretend"


@pytest.mark.slow
@pytest.mark.timeout(900)  # a hundred tests, and the device is compiled first
def test_on_the_pretend_device() -> None:
    assert run("not nightly") > 230


@pytest.mark.nightly
def test_more_kinds_of_weights_on_it() -> None:
    assert run("nightly") > 45


def run(marks: str) -> int:
    """How many of the tests with these marks passed; none may fail or be skipped."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, "-m", marks, str(FOLDER)],
        cwd=ROOT,
        env={**os.environ, "STOWAGE_PRETEND": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    last = done.stdout.splitlines()[-1]
    passed = re.match(r"(\d+) passed", last)
    assert passed and "skipped" not in last, done.stdout[-2000:]
    return int(passed[1])

# SPDX-License-Identifier: Apache-2.0
"""The tests of tests/pretend, each file in a process that has one more device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(path.name for path in (ROOT / "tests" / "pretend").glob("test_*.py"))
LONG = "test_models.py"  # many kinds of use, for each storage
MARKED = [pytest.param(f, marks=pytest.mark.nightly) if f == LONG else f for f in FILES]


def test_there_are_tests() -> None:
    assert "test_offloading.py" in FILES


@pytest.mark.slow
@pytest.mark.parametrize("file", MARKED)
def test_on_the_pretend_device(file: str) -> None:
    run(file)


@pytest.mark.slow
def test_the_long_one_for_one_storage() -> None:
    run(LONG, "-k", "int8 and not operators")


def run(file: str, *chosen: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, f"tests/pretend/{file}", *chosen],
        cwd=ROOT,
        env={**os.environ, "STOWAGE_PRETEND": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout

# SPDX-License-Identifier: Apache-2.0
"""Processes that fork with an offloaded model: children compute the same and end, whatever the
parent did at that moment, and neither sees what the other writes. The scenarios stand in
tests/shared/forking.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


def run(scenario: str, folder: Path, *more: str) -> None:
    ran = subprocess.run(
        [sys.executable, str(SHARED / "forking.py"), scenario, str(folder), *more],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(SHARED), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["lives", "threads", "uses", "writes", "workers"])
def test_children_that_are_forked(scenario: str, tmp_path: Path) -> None:
    run(scenario, tmp_path)


@pytest.mark.slow
def test_children_that_begin_anew(tmp_path: Path) -> None:
    run("workers", tmp_path, "spawn", "forkserver")

# SPDX-License-Identifier: Apache-2.0
"""The tensor on machines that we have no kernel for: some of its tests, by stock torch ops."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOME = "nested or torch_func or double_backward"


@pytest.mark.slow
def test_the_tensor_works_by_stock_ops() -> None:
    files = ("tensor", "functions", "dispatch", "requantize", "guard_refusals")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", SOME]
        + [str(HERE / f"test_{name}.py") for name in files],
        env={**os.environ, "STOWAGE_FORCE_ISA": "composite"},
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    assert " passed" in run.stdout and "skipped" not in run.stdout

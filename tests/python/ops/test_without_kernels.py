# SPDX-License-Identifier: Apache-2.0
"""Ops and the tensor on machines that we have no kernel for: some of their tests, by stock torch
ops below every op."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
OPS = ("opcheck", "autograd")  # gradients, transforms, opcheck
TENSOR = ("stowed", "functions", "operators", "requantize", "writes_refusals")
OF_OPS = " or ".join(f"test_{name}" for name in OPS)
SOME = f"nf4 and ({OF_OPS}) or (nested or torch_func or double_backward) and not ({OF_OPS})"


@pytest.mark.slow
def test_ops_and_the_tensor_work_by_stock_ops() -> None:
    files = [f"torch/test_{name}.py" for name in OPS]
    files += [f"python/tensor/test_{name}.py" for name in TENSOR]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", SOME]
        + [str(TESTS / file) for file in files],
        env={**os.environ, "STOWAGE_FORCE_ISA": "composite"},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    assert " passed" in run.stdout and "skipped" not in run.stdout

# SPDX-License-Identifier: Apache-2.0
"""bench/python/expert_lists.py in a short form: less is read, and next to nothing in vain, where a
router tells what it picks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stowage._ops.library import composite_forced

pytestmark = pytest.mark.skipif(composite_forced(), reason="engines belong to the kernels")
SCRIPT = Path(__file__).resolve().parents[2] / "bench/python/expert_lists.py"


@pytest.mark.slow
def test_less_is_read(tmp_path: Path) -> None:
    small = ["--layers", "2", "--experts", "16", "--taken", "2", "--width", "256", "--tokens", "40"]
    command = [sys.executable, SCRIPT, *small, "--folder", tmp_path, "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    before, now = json.loads(done.stdout).values()
    assert now["MB read"] < before["MB read"]
    assert now["in vain"] < 0.05

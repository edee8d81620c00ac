# SPDX-License-Identifier: Apache-2.0
"""The quickstart runs and leaves nothing behind."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.slow
def test_quickstart(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "quickstart.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for expected in ("int8:row", "nf4:block64", "rule '3' keeps it plain", "f8_e4m3:row"):
        assert expected in done.stdout
    assert not list(tmp_path.iterdir())

# SPDX-License-Identifier: Apache-2.0
"""The migration example runs as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/layerwise_casting.py"


@pytest.mark.slow
def test_example_runs(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, EXAMPLE], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"([\d.]+) of the bytes at rest, output changes by ([\d.]+)", done.stdout)
    assert found, done.stdout
    assert float(found[1]) < 0.52 and 0 < float(found[2]) < 0.2
    assert re.search(r"int8 by rows changes it by 0\.0\d", done.stdout)

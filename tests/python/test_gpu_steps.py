# SPDX-License-Identifier: Apache-2.0
"""The steps of a GPU hour, rehearsed on the CPU: none fails, and all is written down."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_the_steps_can_be_rehearsed(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools/gpu_steps"), "--rehearse", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = json.loads((tmp_path / "steps.json").read_text())
    assert {line["step"] for line in lines} == {1, 2, 3, 5, 6, 7, 8, 9, 10}
    same = [line for line in lines if line["step"] in (2, 3, 8) and line["expected"]]
    assert len(same) >= 12 and all(line["verdict"] == "ok" for line in same)
    assert (tmp_path / "steps.md").read_text().count("\n") == len(lines) + 2

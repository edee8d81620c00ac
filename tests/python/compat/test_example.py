# SPDX-License-Identifier: Apache-2.0
"""The migration example runs as it stands."""

import re
import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/layerwise_casting.py"


@pytest.mark.slow
def test_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("diffusers")
    runpy.run_path(str(EXAMPLE))  # in this process, which has imported diffusers already
    printed = capsys.readouterr().out
    found = re.search(r"([\d.]+) of the bytes at rest, output changes by ([\d.]+)", printed)
    assert found, printed
    assert float(found[1]) < 0.52 and 0 < float(found[2]) < 0.2
    assert re.search(r"int8 by rows changes it by 0\.0\d", printed)

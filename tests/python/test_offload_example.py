# SPDX-License-Identifier: Apache-2.0
"""The example of a model on a disk runs as it stands, and keeps to half the bytes."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/offload.py"


@pytest.mark.slow
def test_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(sys, "argv", ["offload.py", str(tmp_path)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    found = re.search(r"([\d.]+) MiB of weights in ([\d.]+) MiB of memory", printed)
    assert found, printed
    assert float(found[2]) <= float(found[1]) / 2
    assert "GB/s" in printed
    names = {
        event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    }
    assert "model.layers.11.mlp.down_proj" in names


def test_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 80

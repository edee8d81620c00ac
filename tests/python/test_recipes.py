# SPDX-License-Identifier: Apache-2.0
"""The recipes run as they stand; those for a card run on the pretend device (tests/pretend), and
those in C++ are lines of a program that the install test builds and runs."""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
from pathlib import Path

import fresh
import pytest
from torch import nn

import stowage

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/recipes.md").read_text()


def blocks(language: str, heading: str = "") -> list[str]:
    part = PAGE.split(f"\n## {heading}", 1)[1].split("\n## ", 1)[0] if heading else PAGE
    return re.findall(rf"^```{language}\n(.*?)^```", part, re.S | re.M)


@pytest.mark.slow
def test_a_model_twice_the_memory(tmp_path: Path) -> None:
    (code,) = blocks("python", "A model twice my RAM")
    around = {**os.environ, "STOWAGE_LINKS": str(tmp_path / "links.json")}
    done = fresh.run(code, cwd=tmp_path, env=around)
    assert done.returncode == 0, done.stderr
    assert "predicted" in done.stdout and "measured" in done.stdout
    assert "Predicted beside measured" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_every_command_runs(tmp_path: Path) -> None:
    """In the order of the page, in a folder that holds a model and what a pass took."""
    path = sysconfig.get_path("scripts") + os.pathsep + os.environ["PATH"]
    around = {**os.environ, "STOWAGE_LINKS": str(tmp_path / "links.json"), "PATH": path}
    linears = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    stowage.save(linears, tmp_path / "model")
    (tmp_path / "measured.json").write_text('{"seconds": 0.5, "peak": {"ram": 4096}}')
    found = re.findall(r"^`?(stowage (?:pack|plan|report|inspect|verify) [^`\n]+)", PAGE, re.M)
    assert len(found) == 5
    for line in found:
        done = subprocess.run(
            line.split(), cwd=tmp_path, capture_output=True, text=True, env=around
        )
        assert done.returncode == 0 and done.stdout, (line, done.stderr)
    written = {"packed", "plan.json", "plan.html", "report.html"}
    assert written <= {path.name for path in tmp_path.iterdir()}


def test_every_python_block_is_run_somewhere() -> None:
    assert len(blocks("python")) == 2
    assert 'device="cuda:0"' in blocks("python", "A 12 GB card")[0]


def test_lines_of_c_are_those_of_the_program() -> None:
    program = (ROOT / "examples/cpp/planned.cpp").read_text()
    calls = set(re.findall(r"stowage::\w+|\.\w+\(", program))
    for block in blocks("cpp"):
        assert set(re.findall(r"stowage::\w+|\.\w+\(", block)) <= calls
    assert len(program.splitlines()) < 80

# SPDX-License-Identifier: Apache-2.0
"""From how many rows on another way to multiply is taken: measured once, kept, said by the
environment."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import stowage


def said(links: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What a process prints that begins now."""
    return subprocess.run(
        [sys.executable, "-c", f"import json, stowage\n{code}"],
        env=os.environ | {"STOWAGE_LINKS": str(links)} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_what_is_measured_is_in_force_in_later_processes(tmp_path: Path) -> None:
    links = tmp_path / "links.json"
    code = "print(json.dumps(stowage.crossover(anew=True)))"
    measured = json.loads(said(links, code).stdout)
    assert measured.keys() == stowage.crossover().keys()
    assert 1 <= measured["rows"] <= 64
    kept = json.loads(links.read_text())
    (machine,) = kept["machines"].values()
    (numbers,) = machine["crossover"].values()
    assert numbers == measured
    numbers["rows"] = 7
    links.write_text(json.dumps(kept))
    code = "print(stowage.crossover()['rows'])"
    assert said(links, code).stdout == "7\n"
    assert said(links, code, STOWAGE_CROSSOVER="rows=9").stdout == "9\n"
    assert said(links, code, STOWAGE_CROSSOVER="built_in").stdout != "7\n"


def test_stock_ops_have_none(tmp_path: Path) -> None:
    links = tmp_path / "links.json"
    said(links, "stowage.crossover(anew=True)")
    code = "print(stowage.info()['instruction_set'])"
    forced = {"STOWAGE_FORCE_ISA": "composite", "STOWAGE_CROSSOVER": "rows=8"}
    assert said(links, code, **forced).stdout == "composite\n"
    run = said(links, "stowage.crossover()", **forced)
    assert "Unsupported: STOWAGE_FORCE_ISA=composite" in run.stderr


def test_a_set_that_is_not_there_is_told_by_the_first_op(tmp_path: Path) -> None:
    run = said(tmp_path / "none.json", "print(1); stowage.crossover()", STOWAGE_FORCE_ISA="mmx")
    assert run.stdout == "1\n"
    assert "InvalidArgument: STOWAGE_FORCE_ISA=mmx" in run.stderr


@pytest.mark.parametrize("text", ["rows=65", "lines=3"])
def test_what_the_environment_cannot_say(tmp_path: Path, text: str) -> None:
    run = said(tmp_path / "links.json", "", STOWAGE_CROSSOVER=text)
    assert run.returncode == 1
    assert "InvalidArgument: " in run.stderr.splitlines()[-1]

# SPDX-License-Identifier: Apache-2.0
"""The runner of the tests counts what was run, tries nothing again but what waits, and knows every
level of instruction sets."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def runner() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools/run_tests"))


JUNIT = """<testsuites><testsuite>
<testcase classname="a" name="steady"/>
<testcase classname="a" name="second"/><testcase classname="a" name="second"/>
<testcase classname="a" name="never"/><testcase classname="a" name="never"><failure/></testcase>
<testcase classname="a" name="left"><skipped/></testcase>
</testsuite></testsuites>"""


def test_the_runner_counts_a_test_by_its_last_try(runner: dict[str, Any], tmp_path: Path) -> None:
    report = tmp_path / "pytest.xml"
    report.write_text(JUNIT)
    counts = runner["count"](report)
    assert (counts.passed, counts.failed, counts.skipped) == (2, 1, 1)
    assert counts.again == ["a::second"]


def test_a_run_says_what_it_took_of_its_limit(runner: dict[str, Any]) -> None:
    within = runner["within_limit"]
    assert within("standard", 780.4) == "stages took 780 s of the 900 s that two idle cores have"
    assert within("standard", 901).startswith("warning: stages took 901 s of the 900 s")
    assert within("all", 5000) == within("quick", 5000) == ""


def test_the_slowest_are_named_for_each_report(runner: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "asan.xml").write_text(
        '<r><testcase classname="C" name="a" time="1"/><testcase classname="C" name="b" time="3"/>'
        '<testcase classname="C" name="c"/></r>'
    )
    assert runner["slowest"](tmp_path, 1) == [
        "== asan.xml: 3 tests, 4 s; these are 75%",
        "   3.00 s  C::b",
    ]


FAILS_ONCE = """
import pathlib, pytest

def fails_once(name):
    place = pathlib.Path(__file__).with_name(name)
    assert place.exists() or place.touch()

def test_steady():
    fails_once("steady")

@pytest.mark.waits(reason="for a machine of somebody else's")
def test_waiting():
    fails_once("waiting")
"""


def run_pytest(folder: Path, text: str) -> str:
    (folder / "test_it.py").write_text(text)
    (folder / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    options = ["-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml", "--rootdir", folder]
    command = [sys.executable, "-m", "pytest", "-q", *options, folder]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout + done.stderr


def test_only_what_waits_is_tried_again(tmp_path: Path) -> None:
    told = run_pytest(tmp_path, FAILS_ONCE)
    assert "1 failed, 1 passed, 1 rerun" in told and "_ test_steady _" in told, told
    source = (ROOT / "tools/run_tests").read_text()
    assert "--reruns" not in source and "--repeat" not in source


def test_what_waits_says_for_what(tmp_path: Path) -> None:
    assert "must say for what" in run_pytest(tmp_path, FAILS_ONCE.replace("reason=", "why="))


def test_every_instruction_set_is_a_level(runner: dict[str, Any]) -> None:
    row = re.search(
        r"^\| `STOWAGE_FORCE_ISA` \| ([^|]+) \|", (ROOT / "docs/env.md").read_text(), re.M
    )
    levels = {level.ours for level in runner["LEVELS"]}
    others = {"composite", "neon"}  # no set of a CPU; one of AArch64, which tools/test_arm has
    assert levels == set(row[1].strip().split(", ")) - others
    names = [stage.name for stage in runner["stages"]("cpus")]
    for level in runner["LEVELS"]:
        assert f"Python tests, {level.ours}" in names
        assert f"C++ tests, {level.ours}" in names


def test_every_run_repeats_products_as_older_cpus_compute_them(runner: dict[str, Any]) -> None:
    older = [s for s in runner["stages"]("standard") if s.name.startswith("Python products")]
    assert [stage.environment["ATEN_CPU_CAPABILITY"] for stage in older] == ["default", "avx2"]
    assert all((ROOT / path).exists() for path in runner["PRODUCTS"])


def test_a_level_is_left_out_only_where_the_cpu_lacks_it(runner: dict[str, Any]) -> None:
    """A flag that is misspelt would skip its level on every machine."""
    script = "import stowage; print(stowage.info()['instruction_set'])"
    environment = {name: value for name, value in os.environ.items() if name != "STOWAGE_FORCE_ISA"}
    best = subprocess.check_output([sys.executable, "-c", script], text=True, env=environment)
    levels = [level.ours for level in runner["LEVELS"]]
    runs = [level.ours for level in runner["LEVELS"] if not level.lacks()]
    assert runs == levels[: levels.index(best.strip()) + 1]

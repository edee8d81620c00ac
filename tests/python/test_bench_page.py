# SPDX-License-Identifier: Apache-2.0
"""bench/python/bench_page.py: plots are where the numbers say, and the page needs nothing else."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import bench_page
import pytest

Row = dict[str, Any]
SVG = "{http://www.w3.org/2000/svg}"


def kernel(name: str, ratio: float, threads: int = 1) -> Row:
    made = {"name": name, "bytes": 8, "seconds": 1e-3, "gbps": 2.0, "limit_name": "memcpy"}
    return made | {"limit_gbps": 4.0, "ratio": ratio, "threads": threads, "isa": "avx2"}


def product(peer: str, name: str, rows: int | None, ms: float | None, **more: Any) -> Row:
    made = {"name": name, "peer": peer, "group": "4 bits", "rows": rows, "x": "bf16", "threads": 1}
    made |= {"shape": "8 x 8", "ms": ms, "ratio": ms and 0.5, "isa": "avx2", "torch": "2"}
    return made | {"cpu": "a CPU", "note": None, "error": None} | more


KERNELS = [kernel("memcpy", 1.0), kernel("nf4 -> bf16", 0.5), kernel("nf4 -> bf16", 2.0, 2)]
PEERS = [product(p, "nf4", m, ms) for p, m, ms in
         (("stowage", 1, 1.0), ("stowage", 4, 10.0), ("bnb", 1, 2.0), ("bnb", 4, 5.0))]  # fmt: skip
PEERS += [product("gone", "<nf4>", None, None, group=None, error="no wheel & no sources")]


def drawings(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(found) for found in re.findall(r"<svg.*?</svg>", page, re.S)]


def test_bars_are_as_long_as_their_shares() -> None:
    (drawing,) = drawings(bench_page.page(KERNELS))
    one, two = (float(bar.get("width", 0)) for bar in drawing.iter(f"{SVG}rect"))
    assert one > 0 and two == pytest.approx(4 * one)
    limit = drawing.find(f"{SVG}path")
    assert limit is not None
    left = float(next(drawing.iter(f"{SVG}rect")).get("x", 0))
    at = float(re.search(r"M([\d.]+)", limit.get("d", ""))[1])  # type: ignore[index]
    assert at - left == pytest.approx(two / 2, abs=0.1)


def test_lines_go_where_their_numbers_say() -> None:
    (drawing,) = drawings(bench_page.page(PEERS))
    ours, theirs = (
        [tuple(map(float, at.split(","))) for at in line.get("points", "").split()]
        for line in drawing.iter(f"{SVG}polyline")
    )
    left, right = bench_page.LEFT, bench_page.LEFT + bench_page.WIDTH
    top, bottom = bench_page.TOP, bench_page.TOP + bench_page.HEIGHT
    assert ours == [(left, bottom), (right, top)]  # 1 and 10 ms are the ends of the axis
    share = (bottom - theirs[0][1]) / (bottom - top)
    assert share == pytest.approx(0.301, abs=1e-3)  # log10(2)


@pytest.mark.parametrize("rows", [KERNELS, PEERS], ids=["kernels", "peers"])
def test_the_page_needs_nothing_else(rows: list[Row]) -> None:
    page = bench_page.page(rows)
    assert "<script" not in page and "@import" not in page
    assert not re.findall(r"(?:src|href)=|url\(", page)
    assert set(re.findall(r"https?://[^\"]+", page)) == {"http://www.w3.org/2000/svg"}


def test_what_is_not_measured_is_on_the_page_with_its_reason() -> None:
    page = bench_page.page(PEERS)
    assert "<td>gone</td><td>&lt;nf4&gt;</td><td>no wheel &amp; no sources</td>" in page
    only = bench_page.page(PEERS[-1:])
    assert "no wheel" in only and not drawings(only)


def test_the_program_writes_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "kernels.json").write_text(json.dumps(KERNELS))
    command = [sys.executable, bench_page.__file__, str(tmp_path / "kernels.json")]
    told = subprocess.check_output(command, text=True)
    assert told.strip() == str(tmp_path / "kernels.html")
    assert "nf4 -&gt; bf16" in (tmp_path / "kernels.html").read_text()

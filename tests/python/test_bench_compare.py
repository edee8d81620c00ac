# SPDX-License-Identifier: Apache-2.0
"""tools/bench_compare: what it flags, what it passes over, and what it refuses."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools/bench_compare"
Row = dict[str, Any]


def row(name: str, ratio: float | None, **more: Any) -> Row:
    made = {"name": name, "bytes": 8, "seconds": 1.0, "gbps": 2.0, "limit_name": "read"}
    return made | {"limit_gbps": 4.0, "ratio": ratio, "threads": 1, "isa": "avx2"} | more


def compare(folder: Path, old: object, new: object, *more: str) -> tuple[int, str]:
    paths = [folder / "old.json", folder / "new.json"]
    for path, rows in zip(paths, (old, new), strict=True):
        path.write_text(rows if isinstance(rows, str) else json.dumps(rows))
    done = subprocess.run([TOOL, *paths, *more], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_a_loss_of_the_ratio_is_flagged_whatever_the_seconds(tmp_path: Path) -> None:
    old = [row("nf4", 0.80, seconds=9.0), row("int8:row", 0.50, seconds=1.0)]
    new = [row("nf4", 0.75, seconds=1.0), row("int8:row", 0.49, seconds=9.0)]
    status, text = compare(tmp_path, old, new)
    lost, kept = (next(n for n in text.splitlines() if n.startswith(of)) for of in ("nf4", "int8"))
    assert status == 1 and "2 rows compared, 1 lost" in text
    assert lost.split()[-5:] == ["0.800", "0.750", "-6.2", "%", "LOST"]
    assert kept.split()[-4:] == ["0.500", "0.490", "-2.0", "%"]


def test_the_table_is_aligned(tmp_path: Path) -> None:
    rows = [row("a", 1.0), row("a longer name", 100.0)]
    head, *lines = compare(tmp_path, rows, rows)[1].splitlines()[:3]
    assert {len(line) for line in lines} == {len(head)} and head.endswith("change")


@pytest.mark.parametrize(("ratio", "tolerance", "status"), [(0.96, 0.05, 0), (0.96, 0.03, 1)])
def test_the_tolerance(tmp_path: Path, ratio: float, tolerance: float, status: int) -> None:
    more = ("--tolerance", str(tolerance))
    assert compare(tmp_path, [row("nf4", 1.0)], [row("nf4", ratio)], *more)[0] == status


def test_rows_are_told_apart(tmp_path: Path) -> None:
    """By threads, instruction set, limit, and of peers by peer, storage, rows and x."""
    of = [{}, {"threads": 2}, {"isa": "avx512"}, {"limit_name": "memcpy"}]
    of += [{"peer": "torch", "rows": rows, "x": x} for rows in (1, 8) for x in ("bf16", "fp32")]
    old = [row("nf4", 1.0, **more) for more in of]
    for at in range(len(of)):
        new = [row("nf4", 0.5 if i == at else 1.0, **more) for i, more in enumerate(of)]
        status, text = compare(tmp_path, old, list(reversed(new)))
        assert status == 1 and f"{len(of)} rows compared, 1 lost" in text


def test_what_is_in_one_file_only_is_said_and_is_no_loss(tmp_path: Path) -> None:
    old = [row("nf4", 1.0), row("gone", 1.0), row("broken", 1.0)]
    new = [row("nf4", 1.0), row("come", 1.0), row("broken", None, error="no wheel")]
    status, text = compare(tmp_path, old, new)
    assert status == 0 and "1 rows compared" in text
    assert f"only in {tmp_path / 'old.json'}: gone" in text
    assert f"only in {tmp_path / 'new.json'}: come" in text
    assert "broken (threads 1, isa avx2, of read); the other says: no wheel" in text


def test_other_sizes_are_said(tmp_path: Path) -> None:
    text = compare(tmp_path, [row("nf4", 1.0)], [row("nf4", 1.0, bytes=4)])[1]
    assert "1 rows move another number of bytes" in text


@pytest.mark.parametrize(
    ("new", "complaint"),
    [
        ("{", "must be a readable JSON file: Expecting"),
        ({"rows": []}, "must be a list of rows as `stowage bench --json` prints it, got dict"),
        ([], "got an empty one"),
        ([7], "row 0 must be an object, got int"),
        ([{"name": "nf4", "isa": "avx2"}], "it lacks threads, ratio"),
        ([row("nf4", -1.0)], "row 0: ratio must be a number above 0, or null, got -1.0"),
        ([row("nf4", 1.0)] * 2, "row 1 is there twice: nf4 (threads 1, isa avx2, of read)"),
        ([row("nf4", 1.0, isa="avx512")], "no row of"),
    ],
)
def test_files_that_are_none_are_refused_by_name(
    tmp_path: Path, new: object, complaint: str
) -> None:
    status, text = compare(tmp_path, [row("nf4", 1.0)], new)
    assert status == 2 and f"bench_compare: {tmp_path / 'new.json'}: " in text
    assert complaint in text, text


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    done = subprocess.run([TOOL, tmp_path / "a", tmp_path / "b"], capture_output=True, text=True)
    assert done.returncode == 2 and f"{tmp_path / 'a'}: must be a readable JSON" in done.stderr

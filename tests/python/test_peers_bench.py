# SPDX-License-Identifier: Apache-2.0
"""bench/python/peers.py in its quick form, and tools/bench_peers on a machine of stubs."""

from __future__ import annotations

import json
import runpy
import subprocess
from pathlib import Path
from typing import Any

import peers
import pytest
from peer_products import OURS, PEERS

from stowage._ops.library import composite_forced

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    if composite_forced():
        pytest.skip("measures kernels")
    peers.main(["--quick", "--out", str(folder)])
    return folder


@pytest.mark.slow
def test_each_product_has_its_rows(out: Path) -> None:
    rows = json.loads((out / "peers.json").read_text())
    assert not [row["error"] for row in rows if row["error"]]
    products = {(row["peer"], row["name"], row["rows"]) for row in rows}
    names = {("stowage", name) for name in OURS} | {("torch", name) for name in PEERS["torch"]}
    assert products == {(*name, m) for name in names for m in (1, 32)} and len(rows) == 18
    for row in rows:
        wrong = {"dense": 0.005, "8 bits": 0.04, "4 bits": 0.2}[row["group"]]
        assert 0 <= row["relative_error"] < wrong, row
        reads = row["rows"] <= peers.READ_ROWS
        assert row["limit_name"] == ("read" if reads else "multiply-add (gflops)")
        assert row["ratio"] == pytest.approx(row["limit_ms"] / row["ms"])
        assert row["x"] == ("fp32" if row["name"] == "dense fp32" else "bf16")
        assert row["bytes"] >= 512 * 512 // 2 and row["ms"] > 0 and row["isa"] and row["cpu"]


@pytest.mark.slow
def test_the_page_and_the_comparison_take_them(out: Path) -> None:
    assert (out / "peers.html").read_text().count("<svg") == 2  # 8 bits, 4 bits
    file = str(out / "peers.json")
    done = subprocess.run(
        [ROOT / "tools/bench_compare", file, file], capture_output=True, text=True
    )
    assert done.returncode == 0 and "18 rows compared, 0 lost" in done.stdout, done.stderr


def test_the_limit_is_the_better_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = iter(
        [{"read": 1.0, "multiply-add (gflops)": 8.0}, {"read": 2.0, "multiply-add (gflops)": 4.0}]
    )
    monkeypatch.setattr(peers, "limits", lambda threads, quick: next(seen))
    rows = [{"ms": 1.0, "rows": m, "bytes": 10**6} for m in (1, 32)] + [{"ms": None}]
    monkeypatch.setattr(peers, "gathered", lambda options, threads: rows)
    reads, multiplies, absent = peers.measured(given(size=500), 1)
    assert (reads["limit_ms"], reads["ratio"]) == (0.5, 0.5)  # a MB at 2 GB/s
    assert (multiplies["limit_ms"], multiplies["ratio"]) == (2.0, 2.0)  # 16 MFLOP at 8 GFLOP/s
    assert absent == {"ms": None}


def given(**more: Any) -> Any:
    options = {"size": 64, "rows": [1], "rounds": 1, "peers": ["one", "two"], "quick": True}
    return peers.argparse.Namespace(**(options | more))


def test_a_library_that_ends_the_process_gets_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def child(options: Any, names: list[str], threads: int) -> Any:
        asked.append(names)
        return "its process ended with status -11" if "crash" in names else [{"peer": names[0]}]

    makers = {"stowage": {}, "good": {"a": None}, "crash": {"b": None, "c": None}}
    monkeypatch.setattr(peers, "PEERS", makers)
    monkeypatch.setattr(peers, "child", child)
    rows = peers.gathered(given(peers=list(makers)), 2)
    assert asked == [["stowage", "good", "crash"], ["stowage"], ["good"], ["crash"]]
    assert [row["peer"] for row in rows] == ["stowage", "good", "crash", "crash"]
    assert {row["error"] for row in rows[2:]} == {"its process ended with status -11"}
    assert [row["threads"] for row in rows[2:]] == [2, 2]


def test_what_raises_has_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(w: Any, threads: int) -> Any:
        raise ImportError("No module named 'one'\nand more")

    def unfit(w: Any, threads: int) -> Any:
        raise peers.Unfit("it has no product")

    broken = peers.Product("8 bits", 8, lambda x: x.no_such_product())
    makers = {"one": {"a": missing, "b": lambda w, threads: broken}, "two": {"c": unfit}}
    monkeypatch.setattr(peers, "PEERS", makers)
    rows = peers.in_this_process(given(threads=[1]))
    errors = {row["name"]: row["error"] for row in rows}
    assert errors["a"] == "ImportError: No module named 'one'"
    assert errors["c"] == "it has no product"
    assert errors["b"].startswith("AttributeError: ") and len(rows) == 3
    found = peers.with_reasons(rows, {"two": "could not be installed: no wheel"})
    assert [row["error"] for row in found if row["peer"] == "two"] == [
        "could not be installed: no wheel"
    ]
    assert [row["error"] for row in found if row["name"] == "a"] == [errors["a"]]


def test_every_library_is_installed_or_absent_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = runpy.run_path(str(ROOT / "tools/bench_peers"))
    names = tool["reasons"].__globals__
    monkeypatch.setitem(names, "HERE", tmp_path)
    monkeypatch.setitem(names, "SITE", tmp_path / "site")
    asked: list[str] = []

    def run(*command: str) -> None:
        asked.append(command[-1])
        if command[-1].startswith(("openvino", "llama")):
            raise RuntimeError("no matching distribution")

    monkeypatch.setitem(names, "run", run)
    absent = tool["reasons"]()
    said = "could not be installed: no matching distribution"
    assert absent == {"openvino": said, "llama-cpp-python": said}
    assert set(tool["PACKAGES"]) | {tool["SOURCES"]} == set(PEERS) - {"stowage", "torch"}
    assert all("==" in name for name in asked)
    asked.clear()
    tool["reasons"]()  # what was installed is not asked for again, what was not is
    assert [name.split("==")[0] for name in asked] == ["openvino-telemetry", "llama-cpp-python"]

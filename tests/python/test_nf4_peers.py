# SPDX-License-Identifier: Apache-2.0
"""bench/python/nf4_peers.py in a short form: its rows, errors and goals."""

import json
import sys
from typing import Any

import nf4_peers
import pytest
import torch

from stowage._ops.library import composite_forced

OURS = {"nf4", "nested", "torchao form"}


def ran(capsys: pytest.CaptureFixture[str], arguments: str, monkeypatch: Any) -> str:
    threads = torch.get_num_threads()
    monkeypatch.setattr(sys, "argv", ["nf4_peers.py", *arguments.split()])
    try:
        nf4_peers.main()
    finally:
        torch.set_num_threads(threads)
    return capsys.readouterr().out


@pytest.mark.skipif(composite_forced(), reason="compares kernels")
def test_rows_errors_and_goals(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bitsandbytes")
    found = json.loads(ran(capsys, "--json --size 128 --rows 1 8 --rounds 1", monkeypatch))
    seen = {(row["section"], row["form"]) for row in found["rows"]}
    for section in (
        "quantize",
        "dequantize",
        nf4_peers.KEPT,
        "linear M=1",
        "linear M=8",
        "step M=512",
    ):
        assert {form for s, form in seen if s == section} >= OURS | {"bitsandbytes"}, section
    assert ("linear M=8", "bitsandbytes fused") in seen
    assert all(row["ms"] > 0 for row in found["rows"])
    for both in found["errors"].values():
        assert 0 < both["of_fp32"] < 1e-6 < both["relative_error"] < 4e-3  # one rounding to bf16
    assert {"nf4", "bitsandbytes fused", "dense bf16"} <= found["errors"].keys()
    verdicts = {goal["goal"]: goal["verdict"] for goal in found["goals"]}
    assert verdicts["linear nf4, M=8, times the better of bitsandbytes"] in {"met", "NOT MET"}
    assert verdicts["linear nf4, M=512, times the better of bitsandbytes"] == "not measured"


def test_the_table_without_peers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = ran(capsys, "--size 128 --rows 1 --rounds 1 --no-peers", monkeypatch)
    assert "128 x 128 bf16, 1 thread(s)" in told and "step M=512" in told
    assert "bitsandbytes fused" not in told and told.count("not measured") == 11


def test_goals_are_judged() -> None:
    rows = [nf4_peers.Row("quantize", form, ms, "", None) for form, ms in (("nf4", 1.0),)]
    rows += [nf4_peers.Row("quantize", "bitsandbytes", 41.0, "", None)]
    rows += [nf4_peers.Row(f"linear M={m}", "nf4", 1.0, "", None) for m in (1, 8)]
    rows += [nf4_peers.Row(f"linear M={m}", "bitsandbytes", m / 4, "", None) for m in (1, 8)]
    told = {goal.goal: goal for goal in nf4_peers.goals(nf4_peers.Times(rows))}
    assert told["quantize nf4, times bitsandbytes"].verdict == "met"
    assert told["linear nf4, M=1, times the better of bitsandbytes"].verdict == "NOT MET"
    slowest = told["linear nf4, never slower than bitsandbytes"]
    assert (slowest.got, slowest.note, slowest.verdict) == (0.25, "linear M=1", "NOT MET")

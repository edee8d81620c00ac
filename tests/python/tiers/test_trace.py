# SPDX-License-Identifier: Apache-2.0
"""Traces are files that Perfetto reads: spans that nest, waits within them, counters that grow."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from offloadable import ONE_INT8, ONE_WEIGHT, X, made

import stowage


def events(path: Path, kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    assert all(event["ts"] >= 0 and event["pid"] == os.getpid() for event in found)
    return [event for event in found if event["ph"] == kind]


def test_spans_waits_and_counters(tmp_path: Path) -> None:
    model = made("int8")
    given = {"ram": ONE_INT8, "reads": "buffered", "workers": 0}
    stowage.offload(model, folder=tmp_path / "w", **given)  # type: ignore[arg-type]
    model(X)
    before = stowage.engine_report(model)
    with stowage.trace(tmp_path / "t.json"):
        model(X)
    once = stowage.engine_report(model).since(before)
    model(X)  # is not in it
    spans = [e for e in events(tmp_path / "t.json", "X") if e["cat"] == "compute"]
    assert [s["name"] for s in spans] == ["blocks.0", "blocks.1", "blocks.2", "tied", "Model"]
    whole = spans[-1]
    for span in spans[:-1]:
        assert whole["ts"] <= span["ts"]
        assert span["ts"] + span["dur"] <= whole["ts"] + whole["dur"]
    assert sum(s["args"]["uses"] for s in spans[:-1]) == whole["args"]["uses"] == once.acquired
    of_engine = [e for e in events(tmp_path / "t.json", "X") if e["cat"] != "compute"]
    assert [e["cat"] for e in of_engine].count("use") == once.acquired
    assert {e["name"] for e in of_engine} >= {"blocks.0.weight", "blocks.2.weight"}
    reads = [e for e in of_engine if e["cat"] == "read"]
    assert sum(read["args"]["bytes"] for read in reads) == once.bytes_read
    for event in of_engine:
        assert whole["ts"] <= event["ts"] <= whole["ts"] + whole["dur"]
    waits = [e for e in of_engine if e["cat"] == "wait"]
    assert len(waits) == once.misses > 0
    assert 0 < sum(w["dur"] for w in waits) <= once.stall * 1e6  # which counts the tracing too
    counters = [e for e in events(tmp_path / "t.json", "C") if e["name"] == "bytes read"]
    values = [c["args"]["bytes"] for c in counters]
    assert values == sorted(values) and values[-1] - before.bytes_read == once.bytes_read


def test_what_has_no_room_is_told_and_traces_do_not_nest(tmp_path: Path) -> None:
    model = made("int8")
    stowage.offload(model, ram=ONE_WEIGHT, folder=tmp_path / "w")
    with pytest.warns(UserWarning, match="no room for"), stowage.trace(tmp_path / "t.json", 2):
        model(X)
    found = [e for e in events(tmp_path / "t.json", "X") if e["cat"] != "compute"]
    assert len(found) == 2
    one, other = stowage.trace(tmp_path / "a.json"), stowage.trace(tmp_path / "b.json")
    with pytest.raises(stowage.InvalidArgument, match="must end first"), one, other:
        pass
    assert (tmp_path / "a.json").exists() and not (tmp_path / "b.json").exists()
    none = stowage.trace(tmp_path / "c.json", -1)
    with pytest.raises(stowage.InvalidArgument, match="most_events must be >= 0, got -1"), none:
        pass


def test_exceptions_and_threads(tmp_path: Path) -> None:
    model = made("int8")
    stowage.offload(model, ram=ONE_WEIGHT, folder=tmp_path / "w")
    with stowage.trace(tmp_path / "t.json"):
        with pytest.raises(RuntimeError):
            model(X[:, :7])
        threads = [threading.Thread(target=model, args=(X,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    spans = [e for e in events(tmp_path / "t.json", "X") if e["cat"] == "compute"]
    assert len({span["tid"] for span in spans}) == 3
    assert [span["name"] for span in spans].count("Model") == 3


def test_other_models_are_left_alone(tmp_path: Path) -> None:
    model = made()
    with pytest.raises(OSError), stowage.trace(tmp_path / "none" / "t.json"):
        model(X)
    with stowage.trace(tmp_path / "t.json"):
        assert torch.equal(model(X), made()(X))
    assert events(tmp_path / "t.json", "X") == []


def test_compiled_blocks_run_in_a_trace(tmp_path: Path) -> None:
    model = made("int8")
    stowage.offload(model, ram=ONE_WEIGHT, folder=tmp_path / "w")
    torch._dynamo.reset()
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    wanted = model(X)
    with stowage.trace(tmp_path / "t.json"):
        assert torch.equal(model(X), wanted)
    assert events(tmp_path / "t.json", "X")[-1]["name"] == "Model"

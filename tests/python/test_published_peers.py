# SPDX-License-Identifier: Apache-2.0
"""bench/python/published_peers.py in a short form: its rows."""

import json
import sys

import published_peers
import pytest
import torch


def test_rows_of_values_and_products(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    threads = torch.get_num_threads()
    arguments = "--json --size 256 --rows 1 8 --rounds 1 --pool 0"
    monkeypatch.setattr(sys, "argv", ["published_peers.py", *arguments.split()])
    try:
        published_peers.main()
    finally:
        torch.set_num_threads(threads)
    rows = json.loads(capsys.readouterr().out)
    seen = {(row["section"], row["form"]) for row in rows}
    assert {form for section, form in seen if section == "to values"} >= {"gguf Q8_0", "memcpy"}
    for m in (1, 8):
        forms = {form for section, form in seen if section == f"linear M={m}"}
        assert forms >= {"dense bf16", "int4:block32:f16", "mxfp4", "q4_k", "aten int4pack"}
    assert all(row["ms"] > 0 for row in rows)

# SPDX-License-Identifier: Apache-2.0
"""bench/python/models.py in a short form: its rows, and what the smaller storages must save."""

from __future__ import annotations

import json
import sys

import models
import pytest
import torch


def test_rows_of_the_bench(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = torch.get_num_threads()
    arguments = "--models bert llama --storages f8_e4m3 int8:row nf4 --rounds 1 --json"
    monkeypatch.setattr(sys, "argv", ["models.py", *arguments.split()])
    try:
        models.main()
    finally:
        torch.set_num_threads(threads)
    rows = json.loads(capsys.readouterr().out)
    assert [row["storage"] for row in rows] == ["dense", "f8_e4m3", "int8:row", "nf4"] * 2
    limits = {
        "dense": (1.0, 0.01),
        "f8_e4m3": (0.56, 0.1),
        "int8:row": (0.6, 0.03),
        "nf4": (0.4, 0.3),
    }
    for row in rows:
        size, error = limits[row["storage"]]
        assert row["bytes_beside_bf16"] <= size and 0 < row["error_beside_fp32"] < error
        assert row["share_stowed"] > 0.9 or row["storage"] == "dense"
        assert row["time_beside_bf16"] > 0
    with pytest.raises(SystemExit):
        monkeypatch.setattr(sys, "argv", ["models.py", "--models", "unknown"])
        models.main()

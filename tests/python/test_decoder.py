# SPDX-License-Identifier: Apache-2.0
"""bench/python/decoder.py, in a short form: every form computes and takes what it should."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "bench/python/decoder.py"
SMALL = [
    "--layers",
    "2",
    "--hidden",
    "256",
    "--words",
    "64",
    "--tokens",
    "16",
    "--rounds",
    "1",
    "--no-peers",
]
ERRORS = {  # of logits, on random weights; twice what was seen
    "stowage f8_e4m3": 0.16,
    "stowage f8_e4m3:row": 0.12,
    "stowage int8:row": 0.04,
    "stowage nf4": 0.45,
    "stowage nf4:block64:nested": 0.45,
}


@pytest.mark.slow
def test_the_decoder_bench_runs_in_a_short_form() -> None:
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), *SMALL, "--json"],
        capture_output=True,
        text=True,
        env=env,
    )
    assert ran.returncode == 0, ran.stderr
    rows = {row["name"]: row for row in json.loads(ran.stdout[ran.stdout.index("[") :])}
    dense = rows["dense bf16"]
    for name, limit in ERRORS.items():
        assert 0 < rows[name]["relative_error"] < limit, name
        assert rows[name]["decode_ms"] > 0
        # Embedding, head and norms stay bf16: what rests is at most half of the other bytes.
        plain = 2 * 64 * 256 * 2
        assert rows[name]["rest_bytes"] - plain <= 0.51 * (dense["rest_bytes"] - plain) + 4096

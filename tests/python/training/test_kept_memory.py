# SPDX-License-Identifier: Apache-2.0
"""The peak of memory while a model is made follows its formula, and nothing is held twice."""

import json
from pathlib import Path

import fresh
import pytest
import torch
from kept_init import WAYS, Stack, construction
from peaks import peak_of

from stowage.training import MasterOptimizer, quantized_init

SCRIPT = Path(__file__).resolve().parents[3] / "bench/python/kept_init.py"


@pytest.mark.parametrize("storage", ["f8_e4m3:tensor", "nf4:nested"])
@pytest.mark.parametrize("way", WAYS)
def test_the_peak_of_construction(way: str, storage: str) -> None:
    row = construction(way, storage, 256, 4)
    assert abs(row.apart) < 0.01, row
    assert row.then == row.then_formula, row
    values = 4 * 256 * 256 * 4 if way in ("in memory", "master first") else 0
    assert row.end == row.then - (values if way == "in memory" else 0), row


def test_master_first_of_a_bf16_model_has_no_third_copy() -> None:
    width, layers = 256, 4
    torch.set_default_dtype(torch.bfloat16)
    try:
        held = []

        def make() -> None:
            with quantized_init("f8_e4m3:tensor", master_first=True):
                held.append(Stack(width, layers))
            held.append(MasterOptimizer(torch.optim.SGD, held[-1], lr=0.1))

        make()
        held.clear()
        one = width * width
        masters, rest = 4 * one * layers, (one + 4) * layers
        peak = peak_of(make).anywhere
    finally:
        torch.set_default_dtype(torch.float32)
    assert masters + rest <= peak <= masters + rest + 4 * one


@pytest.mark.slow
def test_the_benchmark_runs() -> None:
    done = fresh.script(SCRIPT, "--json", "--width", "64", "--layers", "2", "--weights", "3")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [row["way"] for row in found["construction"]] == list(WAYS)
    assert set(found["casting_ms"]) == {"from_masters", "one by one", "in a group"}

# SPDX-License-Identifier: Apache-2.0
"""Stowed weights in shared memory: handed to other processes, forked and spawned."""

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

import stowage


def _double_first_row(weight: nn.Parameter, results: object) -> None:
    weight.data[0].mul_(2)
    results.put(float(weight.dequantize().sum()))  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_another_process_sees_and_writes_the_same_memory(method: str) -> None:
    layer = nn.Linear(64, 16)
    layer.weight = nn.Parameter(stowage.quantize(layer.weight.detach(), "int8"), False)
    before = layer.weight.dequantize()
    assert not layer.weight.is_shared()
    layer.share_memory()
    assert layer.weight.is_shared()
    assert torch.equal(layer.weight.dequantize(), before)
    context = mp.get_context(method)
    results = context.SimpleQueue()
    child = context.Process(target=_double_first_row, args=(layer.weight, results))
    child.start()
    total = results.get()
    child.join()
    assert torch.equal(layer.weight.dequantize()[0], before[0] * 2)
    assert total == float(layer.weight.dequantize().sum())

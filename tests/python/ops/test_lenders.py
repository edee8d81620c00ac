# SPDX-License-Identifier: Apache-2.0
"""Graphs of weights that rest on the CPU and activations on a device: where their results are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import stowage
from stowage._ops import library

DEVICE = "cuda:0"  # a fake one needs no machine


def parts(storage: str, *shape: int) -> tuple[Any, ...]:
    weight = stowage.quantize(torch.randn(shape), storage)
    codes, *scales = weight.parts.values()
    return codes, scales, weight._storage.key


@pytest.mark.parametrize("storage", ["int8", "f8_e4m3:row", "nf4", "nf4:nested", "f32"])
def test_results_are_where_activations_are(storage: str) -> None:
    codes, scales, key = parts(storage, 64, 128)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    codes, *scales = (mode.from_tensor(part) for part in (codes, *scales))
    with mode:
        x = torch.empty(3, 128, device=DEVICE)
        y = library.linear(x, codes, scales, key, 64, None)
        gx = library.linear_grad_input(y, codes, scales, key, 128)
        ids = torch.zeros(2, 5, dtype=torch.int64, device=DEVICE)
        rows = library.embedding(ids, codes, scales, key, [64, 128], torch.float32)
        assert [str(t.device) for t in (y, gx, rows)] == [DEVICE] * 3
        assert (y.shape, gx.shape, rows.shape) == ((3, 64), (3, 128), (2, 5, 128))
        assert library.dequantize(codes, scales, key, [64, 128], torch.float32).device.type == "cpu"


def test_the_other_way_is_refused() -> None:
    """Codes on a device with activations on the CPU: nobody fetches those."""
    codes, scales, key = parts("int8", 64, 128)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        there = torch.empty(codes.shape, dtype=codes.dtype, device=DEVICE)
        scale = [torch.empty(s.shape, dtype=s.dtype, device=DEVICE) for s in scales]
        with pytest.raises(RuntimeError, match="like codes"):
            library.linear(torch.empty(3, 128), there, scale, key, 64, None)

# SPDX-License-Identifier: Apache-2.0
"""On a device without fp64 and float8, as MPS is, all is computed in what it has, with the bytes
of the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pretend_device import counted, few_types
from torch.nn import functional as F

import stowage
from stowage._ops.numbers import float8

DEVICE = torch.device("pretend:0")
STORAGES = [
    *(
        "f32",
        "bf16",
        "f16",
        "f8_e4m3",
        "f8_e5m2",
        "f8_e4m3:row",
        "f8_e5m2:tensor",
        "int8",
        "int8:row",
    ),
    *("int8:block32:f16", "int8:block64:zero", "nf4", "nf4:nested", "fp4", "mxfp4", "mxfp8_e4m3"),
    *("mxfp8_e5m2", "mxint8", "nvfp4", "nvfp4:row", "f8_e4m3:block128x128", "int4:block64", "q4_k"),
    *("q6_k", "int4:block128:f16:zero", "int3:block128:bf16", "int4:block64:bf16:zero_sum"),
    *("uint4:block64:bf16:zero_rounded", "f4_e2m1:block16:e4m3_quotient"),
]


@pytest.fixture(autouse=True)
def lacking(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(float8, "_LACKING", {"pretend"})
    with counted(), few_types():
        yield


def test_such_a_device_refuses_them() -> None:
    for dtype in (torch.float64, torch.float8_e4m3fn, torch.complex64):
        with pytest.raises(TypeError, match="pretend: the device has no"):
            torch.zeros(3, dtype=dtype, device=DEVICE)
    with pytest.raises(TypeError, match="pretend: the device has no"):
        torch.zeros(3, dtype=torch.uint8, device=DEVICE).view(torch.float8_e5m2).to(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("storage", STORAGES)
def test_bytes_are_those_of_the_cpu(storage: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = torch.randn(64, 512).to(dtype)
    here, there = stowage.quantize(values, storage), stowage.quantize(values.to(DEVICE), storage)
    for mine, theirs in zip(here._parts(), there._parts(), strict=True):
        assert theirs.device == DEVICE
        assert torch.equal(mine.view(-1).view(torch.uint8), theirs.cpu().view(-1).view(torch.uint8))
    rows = torch.tensor([3, 0, 3])
    assert torch.equal(there.dequantize().cpu(), here.dequantize())
    assert torch.equal(F.embedding(rows.to(DEVICE), there).cpu(), F.embedding(rows, here))
    x = torch.randn(3, 512).to(dtype)
    y = F.linear(x.to(DEVICE), there)
    torch.testing.assert_close(y.cpu(), F.linear(x, here), rtol=0.02, atol=0.2)
    g = torch.ones(2, 64, dtype=dtype)
    torch.testing.assert_close((g.to(DEVICE) @ there).cpu(), g @ here, rtol=0.02, atol=0.2)


@pytest.mark.parametrize("storage", ["f8_e4m3", "f8_e5m2"])
def test_casts_of_all_halves(storage: str) -> None:
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        values = every.view(dtype)
        values = values[values.isfinite()].reshape(-1, 1)
        mine, theirs = (
            stowage.quantize(values, storage),
            stowage.quantize(values.to(DEVICE), storage),
        )
        assert torch.equal(mine._parts()[0], theirs._parts()[0].cpu())

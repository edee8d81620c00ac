# SPDX-License-Identifier: Apache-2.0
"""int8 between Stowage (`int8:row:absmax`) and bitsandbytes: the bytes that either quantizes to,
the values of every code, and layers of theirs that open what we write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import stowage

theirs = pytest.importorskip("bitsandbytes")
STORAGE = "int8:row:absmax"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_quantizes_to_their_bytes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(300, 333) * torch.logspace(-3, 2, 300)[:, None]).to(dtype)
    x[3], x[7, 5] = 0, 60000
    codes, absmax, _ = theirs.functional.int8_vectorwise_quant(x)
    ours = stowage.quantize(x, STORAGE)
    assert torch.equal(ours.parts["codes"].view(torch.int8), codes)
    assert torch.equal(ours.parts["absmax"].view(-1), absmax)
    assert ours.parts["absmax"][3] == 0 and not ours.dequantize()[3].any()


def test_every_code_has_their_value() -> None:
    torch.manual_seed(1)
    absmax = torch.cat([torch.randn(4000).abs() * 4, torch.tensor([0.0, 1e-30, 3e38, 127.0])])
    codes = torch.arange(-127, 128).to(torch.int8).repeat(len(absmax), 1)
    wanted = theirs.functional.int8_vectorwise_dequant(codes, absmax)
    parts = {"codes": codes.view(torch.uint8), "absmax": absmax[:, None]}
    ours = stowage.StowedTensor(parts, STORAGE, codes.shape, torch.float32)
    assert torch.equal(ours.dequantize(), wanted)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        assert torch.equal(ours.dequantize(dtype), wanted.to(dtype))
    with_one_product = codes.float() * (absmax * torch.tensor(1 / 127))[:, None]
    apart = (with_one_product != wanted).float().mean()
    assert 0.3 < apart < 0.36, "a scale of its own would not do"


def test_their_layers_open_what_we_write(tmp_path: Path) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(96, 64), nn.Linear(64, 32)).half()
    stowage.stow(model, rules={"*.weight": STORAGE}, skip=[])
    stowage.save(model, tmp_path, dialect="bitsandbytes")
    said = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert said["load_in_8bit"] is said["_load_in_8bit"] is True
    assert said["load_in_4bit"] is said["_load_in_4bit"] is False
    state = load_file(tmp_path / "model.safetensors")
    peer = nn.Sequential(
        *(theirs.nn.Linear8bitLt(k, n, has_fp16_weights=False) for k, n in ((96, 64), (64, 32)))
    )
    for layer in peer:  # which quantizes, as transformers has it before a file is read
        layer.weight = theirs.nn.Int8Params(
            layer.weight.data.to(torch.float16), requires_grad=False, has_fp16_weights=False
        ).to("cpu")
        layer.state.SCB, layer.state.CB = layer.weight.SCB, layer.weight.CB
    peer.load_state_dict(state)
    for ours, other in zip(model, peer, strict=True):
        assert torch.equal(ours.weight.parts["codes"].view(torch.int8), other.weight.data)
        kept = other.weight.SCB if other.weight.SCB is not None else other.state.SCB
        assert torch.equal(ours.weight.parts["absmax"].view(-1), kept)


def test_a_write_to_a_part_of_a_row_keeps_what_it_need_not_change() -> None:
    torch.manual_seed(3)
    weight = stowage.quantize(torch.randn(64, 200), STORAGE)
    before, absmax = weight.dequantize(), weight.parts["absmax"].clone()
    small = before.abs().argmin(1)
    for _ in range(3):
        for row in range(64):
            weight[row, small[row]] = 0.0
    after = weight.dequantize()
    assert torch.equal(weight.parts["absmax"], absmax)
    changed = torch.zeros_like(before, dtype=torch.bool).scatter_(1, small[:, None], True)
    assert torch.equal(after[~changed], before[~changed])
    weight[5, 7] = 100.0
    assert weight.parts["absmax"][5] == 100

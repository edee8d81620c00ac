# SPDX-License-Identifier: Apache-2.0
"""Offloaded plain parameters follow `model.to(dtype)`, and a model's own float8 stays as it is."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import stowage

WIDTH = 192


def make(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).eval().to(dtype)


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16, torch.float64])
def test_plain_weights_change_their_dtype(tmp_path: Path, to: torch.dtype) -> None:
    model, x = make(), torch.randn(3, WIDTH).to(to)
    plain = copy.deepcopy(model).to(to)
    stowage.offload(model, ram="200KiB", folder=tmp_path / "weights")
    model.to(to)
    with torch.inference_mode():
        assert torch.equal(model(x), plain(x))
    stowage.save(model, tmp_path / "saved")
    loaded = stowage.load(lambda: make(to), tmp_path / "saved")
    other = make(to)
    other.load_state_dict(model.state_dict())
    for copied in (loaded, other, copy.deepcopy(other), pickle.loads(pickle.dumps(model))):
        for mine, wanted in zip(copied.parameters(), plain.parameters(), strict=True):
            assert type(mine) is nn.Parameter
            assert torch.equal(mine, wanted)
    stowage.onload(model)
    for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert type(mine) is nn.Parameter
        assert torch.equal(mine, wanted)


def test_a_weight_that_rests_stays_at_rest(tmp_path: Path) -> None:
    model = make()
    stowage.stow(model, "bf16")  # asked for, unlike the cast that offloading makes
    stowage.offload(model, ram="200KiB", folder=tmp_path)
    stowage.onload(model.to(torch.bfloat16))
    assert all(isinstance(layer.weight, stowage.StowedTensor) for layer in model)


class _WithFloat8(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.randn(16, 16).to(torch.float8_e4m3fn))
        values = torch.randn(16, 16).to(torch.float8_e5m2)
        self.codes = nn.Parameter(values, requires_grad=False)


@pytest.mark.parametrize("options", [{}, {"ram": "200KiB"}, {"mmap": True}], ids=str)
def test_a_models_own_float8_stays_plain(tmp_path: Path, options: dict[str, object]) -> None:
    model = _WithFloat8()
    stowage.save(model, tmp_path)
    loaded = stowage.load(_WithFloat8, tmp_path, **options)
    assert type(loaded.table) is torch.Tensor
    assert type(loaded.codes) is nn.Parameter
    for name in ("table", "codes"):
        mine, wanted = getattr(loaded, name), getattr(model, name)
        assert mine.dtype == wanted.dtype
        assert torch.equal(mine.view(torch.uint8), wanted.view(torch.uint8))

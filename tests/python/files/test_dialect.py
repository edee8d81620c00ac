# SPDX-License-Identifier: Apache-2.0
"""Models written in a dialect that they did not come from: the files are recognised, have the same
values, and nothing is written where the dialect lacks a storage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from dialect_models import copied, opened, weights_of
from torch import nn
from transformers.pytorch_utils import Conv1D

import stowage

PAIRS = [
    ("ct-int4-asym-g32", "compressed-tensors:pack-quantized"),
    ("gptq-v1", "awq"),
    ("gptq-v1", "gptq:gptq_v2"),
    ("gptq-v2", "compressed-tensors"),
    ("gptq-v1-actorder", "compressed-tensors"),
    ("gptq-v2-actorder", "gptq"),
    ("awq-gemm", "gptq"),
    ("ct-fp8-block", "fp8"),
    ("ct-int8", "torchao"),
    ("ct-int8", "compressed-tensors:pack-quantized"),
    ("ct-mxfp8", "modelopt"),
    ("comfy-fp8", "comfyui-scaled"),
    ("comfy-fp8-scaled", "comfyui"),
    ("comfy-fp8", "modelopt"),
    ("torchao-float8", "compressed-tensors"),
]


@pytest.mark.parametrize(("folder", "dialect"), PAIRS)
def test_another_dialect_has_the_same_values(folder: str, dialect: str, tmp_path: Path) -> None:
    model = opened(folder, copied(folder, tmp_path), compute_dtype=torch.bfloat16)
    path = stowage.save(model, tmp_path / "other", dialect=dialect)
    assert "stowage" not in json.loads(_header(path))["__metadata__"]
    again = opened(folder, tmp_path / "other", compute_dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        found = again.get_parameter(name)
        if name in weights_of(folder):
            assert isinstance(found, stowage.StowedTensor) and found.resting == parameter.resting
            found, parameter = found.dequantize(), parameter.dequantize()
        assert torch.equal(found.view(torch.int16), parameter.view(torch.int16)), name


def _header(path: Path) -> bytes:
    data = path.read_bytes()
    return data[8 : 8 + int.from_bytes(data[:8], "little")]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 32, dtype=torch.bfloat16)
        self.last = nn.Linear(32, 16, bias=False, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("storage", "dialect"),
    [
        ("nf4:nested", "bitsandbytes"),
        ("nvfp4", "modelopt"),
        ("mxfp4", "compressed-tensors"),
        ("int4:block32:bf16", "compressed-tensors"),
        ("f8_e4m3:block32x32", "fp8"),
        ("int4:block32:f16:zero", "gptq"),
    ],
)
def test_a_stowed_model_is_written_for_others(storage: str, dialect: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Layers()
    stowage.stow(model, storage, skip=["last"])
    stowage.save(model, tmp_path, dialect=dialect)
    again = stowage.load(Layers, tmp_path)
    assert isinstance(again.first.weight, stowage.StowedTensor)
    assert again.first.weight.resting == model.first.weight.resting
    assert torch.equal(again.first.weight.dequantize(), model.first.weight.dequantize())
    assert torch.equal(again.last.weight, model.last.weight)
    said = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == dialect
    assert (tmp_path / "hf_quant_config.json").exists() == (dialect == "modelopt")


MODES = {
    "a default device": lambda: torch.device("meta"),
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("storage", "dialect"),
    [
        ("nf4:nested", "bitsandbytes"),
        ("int4:block32:bf16", "compressed-tensors"),
        ("int4:block32:f16:zero", "gptq"),
        ("f8_e4m3:block32:e8m0", "comfyui"),
    ],
)
def test_modes_of_torch_change_no_byte(
    storage: str, dialect: str, mode: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Layers()
    stowage.stow(model, storage, skip=["last"])
    stowage.save(model, tmp_path / "before", dialect=dialect)
    with MODES[mode]():
        stowage.save(model, tmp_path / "within", dialect=dialect)
    files = {file.name: file.read_bytes() for file in (tmp_path / "before").iterdir()}
    assert files == {file.name: file.read_bytes() for file in (tmp_path / "within").iterdir()}


class Others(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 32, dtype=torch.bfloat16)
        self.turned = Conv1D(64, 32).to(torch.bfloat16)
        self.linear = nn.Linear(32, 64, bias=False, dtype=torch.bfloat16)


def test_refuses_matrices_of_other_modules(tmp_path: Path) -> None:
    model = Others()
    stowage.stow(model, "f8_e4m3:row", rules={"*.weight": "f8_e4m3:row"})
    with pytest.raises(stowage.InvalidArgument, match="2 problems, nothing was changed") as error:
        stowage.save(model, tmp_path / "out", dialect="modelopt")
    for name, kind in (("table", "Embedding"), ("turned", "Conv1D")):
        assert f"{name}.weight: must be of a Linear module" in str(error.value)
        assert f"got {kind}" in str(error.value)
    assert not list((tmp_path / "out").iterdir())
    stowage.unstow(model)
    stowage.stow(model, "f8_e4m3:row", skip=["table", "turned"])
    stowage.save(model, tmp_path / "out", dialect="modelopt")


def test_refuses_before_anything_is_written(tmp_path: Path) -> None:
    model = Layers()
    with pytest.raises(stowage.InvalidArgument, match="must hold a weight that rests, got none"):
        stowage.save(model, tmp_path / "out", dialect="fp8")
    stowage.stow(model, "nf4")
    with pytest.raises(
        stowage.InvalidArgument,
        match=r"first.weight: must rest in a storage that fp8 has, got nf4:block64 \[32, 64\]; "
        "it is held by bitsandbytes",
    ):
        stowage.save(model, tmp_path / "out", dialect="fp8")
    with pytest.raises(
        stowage.InvalidArgument, match=r"dialect: must be one of comfyui, .* 'ggml'"
    ):
        stowage.save(model, tmp_path / "out", dialect="ggml")
    assert not list((tmp_path / "out").iterdir())
    model = Layers()
    stowage.stow(model, "f8_e4m3:tensor")
    with pytest.raises(stowage.InvalidArgument, match="must have a scale that bf16 holds"):
        stowage.save(model, tmp_path / "out", dialect="comfyui")

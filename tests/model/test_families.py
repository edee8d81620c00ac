# SPDX-License-Identifier: Apache-2.0
"""Models of other shapes are built without memory for their weights, and come back whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from transformers import AutoConfig, AutoModel

import stowage

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 100}
IDS = {"input_ids": torch.tensor([[1, 2, 3, 4]])}
PIXELS = {"pixel_values": torch.rand(1, 3, 32, 32)}
SOUND = {"input_features": torch.rand(1, 16, 100)}
MODELS: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor], int]] = {
    "t5": (  # lists wo in _keep_in_fp32_modules, ties its embeddings
        {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "d_kv": 16, "vocab_size": 100},
        {**IDS, "decoder_input_ids": IDS["input_ids"]},
        31,
    ),
    "swin": (  # computes drop path rates and position tables in its constructor
        {
            "image_size": 32,
            "embed_dim": 16,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 4,
        },
        PIXELS,
        14,
    ),
    "whisper": (  # convolutions, computed positions
        {
            **{f"{side}_layers": 1 for side in ("encoder", "decoder")},
            **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
            **{f"{side}_ffn_dim": 64 for side in ("encoder", "decoder")},
            **{"d_model": 32, "vocab_size": 100, "num_mel_bins": 16, "max_source_positions": 50},
            **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
            "decoder_start_token_id": 1,
        },
        {**SOUND, "decoder_input_ids": IDS["input_ids"]},
        21,
    ),
    "qwen2_moe": (  # experts as bare parameters of three dimensions, chosen by a rule
        {
            **SMALL,
            "num_key_value_heads": 2,
            "intermediate_size": 64,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "num_experts": 4,
        },
        IDS,
        21,
    ),
    "gemma2": (
        {**SMALL, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 64},
        IDS,
        15,
    ),
}


@pytest.mark.parametrize("family", MODELS)
@torch.no_grad()
def test_saved_and_built_again(tmp_path: Path, family: str) -> None:
    arguments, inputs, stowed = MODELS[family]
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **arguments)
    model = AutoModel.from_config(config).eval()
    rules: Any = {"*.experts.*_proj": "int8:row2"} if "num_experts" in arguments else None
    report = stowage.stow(model, "nf4", rules=rules)
    assert len(report.stowed) == stowed
    expected = model(**inputs)[0]
    stowage.save(model, tmp_path)
    loaded = stowage.load(lambda: AutoModel.from_config(config), tmp_path).eval()
    assert torch.equal(loaded(**inputs)[0], expected)
    stowage.unstow(model)
    assert torch.allclose(model(**inputs)[0], expected, atol=1e-4)


@torch.no_grad()
def test_t5_computes_in_bf16_around_its_fp32_layers() -> None:
    arguments, inputs, _ = MODELS["t5"]
    model = AutoModel.from_config(AutoConfig.for_model("t5", **arguments)).eval()
    stowage.stow(model, "int8", compute_dtype=torch.bfloat16)
    assert model.encoder.block[0].layer[1].DenseReluDense.wo.weight.dtype == torch.float32
    assert model(**inputs)[0].dtype == torch.bfloat16

# SPDX-License-Identifier: Apache-2.0
"""The text encoders that ComfyUI publishes beside Flux, CLIP-L and T5 in scaled fp8, in
transformers' models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import stowage

transformers = pytest.importorskip("transformers")
IDS = torch.arange(6)[None]


def clip() -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    more = {"vocab_size": 99, "num_attention_heads": 4, "max_position_embeddings": 16}
    return transformers.CLIPTextModel(transformers.CLIPTextConfig(**sizes, **more)).half().eval()


def t5() -> Any:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(**sizes, vocab_size=99, feed_forward_proj="gated-gelu")
    return transformers.T5EncoderModel(config).half().eval()


# What the published files have beside the model's parameters: a buffer, and a table twice.
MODELS = {"clip": (clip, "position_ids"), "t5": (t5, ""), "t5 with its table twice": (t5, "table")}


def scaled(values: dict[str, torch.Tensor], path: Path) -> dict[str, torch.Tensor]:
    """Writes matrices of layers as codes with a scale; what they are then worth."""
    tensors, worth = {"scaled_fp8": torch.zeros(0, dtype=torch.float8_e4m3fn)}, {}
    for name, value in values.items():
        tensors[name] = worth[name] = value
        in_layer = ".layers." in name or ".block." in name
        if in_layer and value.dim() == 2 and "relative_attention_bias" not in name:
            scale = value.float().abs().max() / 448
            tensors[name] = (value.float() / scale).to(torch.float8_e4m3fn)
            tensors[f"{name.removesuffix('weight')}scale_weight"] = scale
            worth[name] = tensors[name].half() * scale.half()
    save_file(tensors, path)
    return worth


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("which", MODELS)
def test_opens_with_its_values_and_is_written_again(which: str, mmap: bool, tmp_path: Path) -> None:
    make, more = MODELS[which]
    torch.manual_seed(0)
    make().save_pretrained(tmp_path / "plain")  # under the names that are published
    published = load_file(tmp_path / "plain/model.safetensors")
    path = tmp_path / "encoder.safetensors"
    told = dict(published)
    if more == "position_ids":
        prefix = next(iter(published)).split("embeddings")[0]
        told[f"{prefix}embeddings.position_ids"] = torch.arange(16)[None]
    elif more == "table":
        told["encoder.embed_tokens.weight"] = told["shared.weight"].clone()
    worth = scaled(told, path)
    save_file(
        {n: worth[n] for n in published}, tmp_path / "plain/model.safetensors", {"format": "pt"}
    )
    dense = type(make()).from_pretrained(tmp_path / "plain").half().eval()
    model = stowage.load(make, path, mmap=mmap, exact=True)
    rests = [p for p in model.parameters() if isinstance(p, stowage.StowedTensor)]
    assert len(rests) == (12 if make is clip else 14)
    with torch.no_grad():
        got, wanted = (m(IDS).last_hidden_state for m in (model, dense))
    assert torch.equal(got, wanted)
    stowage.save(model, tmp_path / "again", dialect="comfyui-scaled")
    assert (tmp_path / "again/encoder.safetensors").read_bytes() == path.read_bytes()

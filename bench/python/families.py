# SPDX-License-Identifier: Apache-2.0
"""Small models of the families that people run, with random weights and one batch of inputs each.
The shapes are real, the sizes are not: each has some 0.1 to 2 million parameters."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModel

import stowage

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """How to build a model, and what to call it with (floating inputs in fp32)."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]

    def build(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.make().eval()

    def batch(self, dtype: torch.dtype = torch.float32) -> Inputs:
        torch.manual_seed(1)
        given = self.inputs().items()
        return {
            k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
            for k, v in given
        }


def answer(model: nn.Module, batch: Inputs) -> torch.Tensor:
    """The first tensor that the model gives back."""
    found = model(**batch)
    return found if isinstance(found, torch.Tensor) else found[0]


def unfit(storage: str) -> Callable[[str, nn.Module], bool]:
    """A pattern of the weights that a storage cannot hold."""

    def check(name: str, module: nn.Module) -> bool:
        weight = module.get_parameter(name.rpartition(".")[2]).detach()
        try:
            stowage.quantize(weight, storage)
        except stowage.InvalidArgument:
            return True
        return False

    return check


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference beside the norm."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def _diffusers(name: str, **arguments: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import diffusers

        model: nn.Module = getattr(diffusers, name)(**arguments)
        # The output layer of a DiT starts at zero, and then every error is lost.
        for parameter in model.parameters():
            if not parameter.any():
                nn.init.normal_(parameter.data, std=0.02)
        return model

    return make


def _transformers(kind: str, part: str = "", **arguments: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        config = AutoConfig.for_model(kind, **arguments)
        return getattr(transformers, part)(config) if part else AutoModel.from_config(config)

    return make


def _ids(*names: str, vocabulary: int = 128) -> Callable[[], Inputs]:
    return lambda: {name: torch.randint(3, vocabulary, (2, 12)) for name in names or ("input_ids",)}


def _random(**shapes: tuple[int, ...]) -> Callable[[], Inputs]:
    return lambda: {name: torch.randn(shape) for name, shape in shapes.items()}


def _both(*parts: Callable[[], Inputs]) -> Callable[[], Inputs]:
    return lambda: {name: value for part in parts for name, value in part().items()}


def _given(**values: torch.Tensor) -> Callable[[], Inputs]:
    return lambda: dict(values)


SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
DECODER = {
    **SMALL,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}
TOWER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
T5 = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16, "vocab_size": 128}
WHISPER = {
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 128 for side in ("encoder", "decoder")},
    **{"d_model": 64, "vocab_size": 128, "num_mel_bins": 16, "max_source_positions": 50},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
}

DIFFUSION = {
    "unet": Family(
        _diffusers(
            "UNet2DConditionModel",
            sample_size=16,
            layers_per_block=1,
            block_out_channels=(32, 64),
            norm_num_groups=8,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=32,
            attention_head_dim=4,
        ),
        _both(
            _random(sample=(2, 4, 16, 16), encoder_hidden_states=(2, 5, 32)),
            _given(timestep=torch.tensor(7)),
        ),
    ),
    "dit": Family(
        _diffusers(
            "DiTTransformer2DModel",
            num_attention_heads=4,
            attention_head_dim=16,
            in_channels=4,
            num_layers=2,
            sample_size=16,
            num_embeds_ada_norm=10,
        ),
        _both(
            _random(hidden_states=(2, 4, 16, 16)),
            _given(timestep=torch.tensor([3, 9]), class_labels=torch.tensor([1, 4])),
        ),
    ),
    "flux": Family(
        _diffusers(
            "FluxTransformer2DModel",
            patch_size=1,
            in_channels=16,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=4,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            axes_dims_rope=(4, 4, 8),
        ),
        _both(
            _random(
                hidden_states=(2, 16, 16),
                encoder_hidden_states=(2, 6, 32),
                pooled_projections=(2, 32),
            ),
            _given(timestep=torch.tensor([0.3, 0.9])),
            lambda: {"img_ids": torch.randn(16, 3), "txt_ids": torch.zeros(6, 3)},
        ),
    ),
    "pixart": Family(  # scale and shift tables as bare parameters
        _diffusers(
            "PixArtTransformer2DModel",
            num_attention_heads=4,
            attention_head_dim=16,
            in_channels=4,
            out_channels=8,
            num_layers=2,
            sample_size=16,
            cross_attention_dim=64,
            caption_channels=32,
        ),
        _both(
            _random(hidden_states=(2, 4, 16, 16), encoder_hidden_states=(2, 5, 32)),
            _given(timestep=torch.tensor([3, 9])),
            lambda: {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
        ),
    ),
    "vae": Family(
        _diffusers(
            "AutoencoderKL",
            block_out_channels=(16, 32),
            norm_num_groups=8,
            down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
            up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
            latent_channels=4,
            sample_size=32,
        ),
        _random(sample=(2, 3, 32, 32)),
    ),
}
LANGUAGE = {
    "t5 encoder": Family(_transformers("t5", "T5EncoderModel", **T5), _ids()),
    "t5": Family(_transformers("t5", **T5), _ids("input_ids", "decoder_input_ids")),
    "clip": Family(
        _transformers(
            "clip",
            text_config={**TOWER, "vocab_size": 128, "eos_token_id": 127},
            vision_config={**TOWER, "image_size": 32, "patch_size": 8},
            projection_dim=32,
        ),
        _both(_ids(), _random(pixel_values=(2, 3, 32, 32))),
    ),
    "bert": Family(_transformers("bert", **SMALL, intermediate_size=128), _ids()),
    "llama": Family(_transformers("llama", "LlamaForCausalLM", **DECODER), _ids()),
    "qwen2": Family(_transformers("qwen2", **DECODER), _ids()),
    "qwen3": Family(_transformers("qwen3", **DECODER, head_dim=16), _ids()),
    "whisper": Family(
        _transformers("whisper", **WHISPER),
        _both(_random(input_features=(2, 16, 100)), _ids("decoder_input_ids")),
    ),
}
VISION = {
    "vit": Family(  # class token and positions as bare parameters
        _transformers("vit", **TOWER, image_size=32, patch_size=8),
        _random(pixel_values=(2, 3, 32, 32)),
    ),
    "swin": Family(  # computes drop path rates and position tables in its constructor
        _transformers(
            "swin", image_size=32, embed_dim=32, depths=[1, 1], num_heads=[2, 2], window_size=4
        ),
        _random(pixel_values=(2, 3, 32, 32)),
    ),
}
MIXTURE = {
    "qwen2_moe": Family(  # experts as bare parameters of three dimensions
        _transformers(
            "qwen2_moe",
            **DECODER,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
            num_experts=4,
        ),
        _ids(),
    ),
    "gemma2": Family(_transformers("gemma2", **DECODER, head_dim=16), _ids()),
}
FAMILIES = {**DIFFUSION, **LANGUAGE, **VISION, **MIXTURE}
STORAGES = (
    *("f8_e4m3", "f8_e4m3:row", "f8_e4m3:block32", "f8_e5m2", "f8_e5m2:row"),
    *("int8:row", "int8:tensor", "int8:block32"),
    *("nf4", "nf4:block128", "nf4:block64:nested", "fp4", "fp4:block64:nested"),
    *("bf16", "f16", "f32"),
)
PUBLISHED = (  # forms that checkpoints are published in
    *("mxfp8_e4m3", "mxfp8_e5m2", "mxint8", "int8:block32:f16", "f8_e4m3:block128x128"),
    *("mxfp4", "nvfp4", "int4:block32:f16", "int4:block128:bf16", "int4:block128:f16:zero", "q4_k"),
)

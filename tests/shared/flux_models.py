# SPDX-License-Identifier: Apache-2.0
"""Small Flux transformers of diffusers, and the files that their first authors would have written
of them."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import torch

import stowage

QKV = "double_blocks.1.img_attn.qkv.weight"
TO_Q = "transformer_blocks.1.attn.to_q.weight"
TO_K = "transformer_blocks.1.attn.to_k.weight"

Values = Mapping[str, torch.Tensor]

_DOUBLE = {
    "img_mod.lin": "norm1.linear",
    "txt_mod.lin": "norm1_context.linear",
    "img_attn.proj": "attn.to_out.0",
    "txt_attn.proj": "attn.to_add_out",
    "img_mlp.0": "ff.net.0.proj",
    "img_mlp.2": "ff.net.2",
    "txt_mlp.0": "ff_context.net.0.proj",
    "txt_mlp.2": "ff_context.net.2",
}
_TOP = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "final_layer.linear": "proj_out",
}
_EMBEDDERS = {"time_in": "timestep_embedder", "vector_in": "text_embedder"}


def built(head: int = 64, guidance: bool = True, heads: int = 4, **more: Any) -> Any:
    """Seeded, with norms that are not the ones of a new model."""
    import diffusers

    sizes = {
        "in_channels": 32,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": head,
        "num_attention_heads": heads,
        "joint_attention_dim": 256,
        "pooled_projection_dim": 256,
        "guidance_embeds": guidance,
        "axes_dims_rope": (head // 4, head // 4, head // 2),
    } | more
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(**sizes).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".norm_" in name and parameter.dim() == 1:
                parameter.normal_(1, 0.3)
    return model


def original(values: Values, prefix: str = "") -> dict[str, torch.Tensor]:
    """Tensors as their first authors name and join them, of a model's by its names."""
    found: dict[str, torch.Tensor] = {}
    embedders = dict(_EMBEDDERS)
    if any("guidance_embedder" in name for name in values):
        embedders["guidance_in"] = "guidance_embedder"
    for last in ("weight", "bias"):

        def join(*names: str, last: str = last) -> torch.Tensor:
            return torch.cat([values[f"{name}.{last}"] for name in names])

        for theirs, ours in _TOP.items():
            found[f"{theirs}.{last}"] = values[f"{ours}.{last}"]
        for theirs, ours in embedders.items():
            for layer, number in (("in_layer", 1), ("out_layer", 2)):
                own = values[f"time_text_embed.{ours}.linear_{number}.{last}"]
                found[f"{theirs}.{layer}.{last}"] = own
        scale, shift = values[f"norm_out.linear.{last}"].chunk(2)
        found[f"final_layer.adaLN_modulation.1.{last}"] = torch.cat([shift, scale])
        for i in _blocks(values, "transformer_blocks"):
            theirs, ours = f"double_blocks.{i}", f"transformer_blocks.{i}"
            for one, other in _DOUBLE.items():
                found[f"{theirs}.{one}.{last}"] = values[f"{ours}.{other}.{last}"]
            image = [f"{ours}.attn.to_{x}" for x in "qkv"]
            text = [f"{ours}.attn.add_{x}_proj" for x in "qkv"]
            found[f"{theirs}.img_attn.qkv.{last}"] = join(*image)
            found[f"{theirs}.txt_attn.qkv.{last}"] = join(*text)
        for i in _blocks(values, "single_transformer_blocks"):
            theirs, ours = f"single_blocks.{i}", f"single_transformer_blocks.{i}"
            found[f"{theirs}.modulation.lin.{last}"] = values[f"{ours}.norm.linear.{last}"]
            found[f"{theirs}.linear2.{last}"] = values[f"{ours}.proj_out.{last}"]
            every = [*(f"{ours}.attn.to_{x}" for x in "qkv"), f"{ours}.proj_mlp"]
            found[f"{theirs}.linear1.{last}"] = join(*every)
    for i in _blocks(values, "transformer_blocks"):
        for stream, mark in (("img", ""), ("txt", "added_")):
            for part, letter in (("query", "q"), ("key", "k")):
                own = values[f"transformer_blocks.{i}.attn.norm_{mark}{letter}.weight"]
                found[f"double_blocks.{i}.{stream}_attn.norm.{part}_norm.scale"] = own
    for i in _blocks(values, "single_transformer_blocks"):
        for part, letter in (("query", "q"), ("key", "k")):
            own = values[f"single_transformer_blocks.{i}.attn.norm_{letter}.weight"]
            found[f"single_blocks.{i}.norm.{part}_norm.scale"] = own
    return {prefix + name: value.detach().contiguous() for name, value in found.items()}


def _blocks(values: Values, kind: str) -> list[int]:
    return sorted({int(name.split(".")[1]) for name in values if name.startswith(f"{kind}.")})


def inputs(model: Any, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    torch.manual_seed(1)
    config = model.config
    return {
        "hidden_states": torch.randn(1, 6, config.in_channels, dtype=dtype),
        "encoder_hidden_states": torch.randn(1, 5, config.joint_attention_dim, dtype=dtype),
        "pooled_projections": torch.randn(1, config.pooled_projection_dim, dtype=dtype),
        "timestep": torch.tensor([0.5], dtype=dtype),
        "img_ids": torch.randint(0, 4, (6, 3)).to(dtype),
        "txt_ids": torch.zeros(5, 3, dtype=dtype),
        "guidance": torch.tensor([3.5], dtype=dtype) if config.guidance_embeds else None,
    }


def answer(model: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(**inputs(model, dtype)).sample
    return found


def theirs(inner: int) -> Any:
    """diffusers' conversion, which knows one width, of another."""
    from diffusers.loaders import single_file_utils

    convert = single_file_utils.convert_flux_transformer_checkpoint_to_diffusers
    code = convert.__code__
    assert 3072 in code.co_consts
    consts = tuple(inner if const == 3072 else const for const in code.co_consts)
    return types.FunctionType(code.replace(co_consts=consts), convert.__globals__)


def values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.dequantize() if isinstance(tensor, stowage.StowedTensor) else tensor


def assert_same(model: Any, want: Any) -> None:
    for (name, value), other in zip(want.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(values(other), value), name

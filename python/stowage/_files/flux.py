# SPDX-License-Identifier: Apache-2.0
"""Flux, as Black Forest Labs publish it, in diffusers' FluxTransformer2DModel: names of the file,
and those that the model has for its rows, in their order."""

from __future__ import annotations

DIALECT = "flux"
ARCHITECTURE = "flux"  # as GGUF files name it

_MODULES: dict[str, tuple[str, ...]] = {
    "img_in": ("x_embedder",),
    "txt_in": ("context_embedder",),
    "time_in.in_layer": ("time_text_embed.timestep_embedder.linear_1",),
    "time_in.out_layer": ("time_text_embed.timestep_embedder.linear_2",),
    "vector_in.in_layer": ("time_text_embed.text_embedder.linear_1",),
    "vector_in.out_layer": ("time_text_embed.text_embedder.linear_2",),
    "guidance_in.in_layer": ("time_text_embed.guidance_embedder.linear_1",),
    "guidance_in.out_layer": ("time_text_embed.guidance_embedder.linear_2",),
    "final_layer.linear": ("proj_out",),
    "final_layer.adaLN_modulation.1": ("norm_out.linear",),
}
_DOUBLE: dict[str, tuple[str, ...]] = {
    "img_mod.lin": ("norm1.linear",),
    "txt_mod.lin": ("norm1_context.linear",),
    "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "img_attn.proj": ("attn.to_out.0",),
    "txt_attn.proj": ("attn.to_add_out",),
    "img_mlp.0": ("ff.net.0.proj",),
    "img_mlp.2": ("ff.net.2",),
    "txt_mlp.0": ("ff_context.net.0.proj",),
    "txt_mlp.2": ("ff_context.net.2",),
}
_SINGLE: dict[str, tuple[str, ...]] = {
    "modulation.lin": ("norm.linear",),
    "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
    "linear2": ("proj_out",),
}
_NORMS = {
    "double_blocks.*.img_attn.norm.query_norm.scale": "transformer_blocks.*.attn.norm_q.weight",
    "double_blocks.*.img_attn.norm.key_norm.scale": "transformer_blocks.*.attn.norm_k.weight",
    "double_blocks.*.txt_attn.norm.query_norm.scale": (
        "transformer_blocks.*.attn.norm_added_q.weight"
    ),
    "double_blocks.*.txt_attn.norm.key_norm.scale": "transformer_blocks.*.attn.norm_added_k.weight",
    "single_blocks.*.norm.query_norm.scale": "single_transformer_blocks.*.attn.norm_q.weight",
    "single_blocks.*.norm.key_norm.scale": "single_transformer_blocks.*.attn.norm_k.weight",
}


def _of_blocks(
    file: str, model: str, modules: dict[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    return {
        f"{file}.*.{name}": tuple(f"{model}.*.{each}" for each in names)
        for name, names in modules.items()
    }


_EVERY = {
    **_MODULES,
    **_of_blocks("double_blocks", "transformer_blocks", _DOUBLE),
    **_of_blocks("single_blocks", "single_transformer_blocks", _SINGLE),
}
PARAMETERS: dict[str, tuple[str, ...]] = {
    f"{module}.{last}": tuple(f"{each}.{last}" for each in names)
    for module, names in _EVERY.items()
    for last in ("weight", "bias")
} | {name: (each,) for name, each in _NORMS.items()}
# Shift, then scale in the file; scale, then shift in the model.
SWAPPED = ("final_layer.adaLN_modulation.1.weight", "final_layer.adaLN_modulation.1.bias")

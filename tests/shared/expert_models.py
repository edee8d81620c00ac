# SPDX-License-Identifier: Apache-2.0
"""Small mixtures of experts of transformers, and what they are asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

IDS = torch.arange(12).view(2, 6)
WAYS = ["eager", "grouped_mm", "batched_mm"]

_SIZES = {
    "vocab_size": 64, "hidden_size": 256, "intermediate_size": 128, "moe_intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_experts_per_tok": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 4},
    "Mixtral": {"num_local_experts": 4},
    "DeepseekV3": {
        "n_routed_experts": 4, "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 32,
        "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "n_group": 2,
        "topk_group": 1, "num_key_value_heads": 4,
    },
}  # fmt: skip


def build(family: str) -> Any:
    import transformers

    config = getattr(transformers, f"{family}Config")(**{**_SIZES, **FAMILIES[family]})
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def published(family: str, to: Path) -> Path:
    """A plain model, by the owner's writer, which gives each expert tensors of its own."""
    torch.manual_seed(0)
    build(family).save_pretrained(to)
    return to


def logits(model: Any, way: str) -> torch.Tensor:
    model.set_experts_implementation(way)
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found

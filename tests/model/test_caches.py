# SPDX-License-Identifier: Apache-2.0
"""`generate` of transformers with each of its caches: resting weights give the tokens and the
logits of the plain model, bit for bit."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3NextConfig,
    set_seed,
)

from stowage.integrations.transformers import StowageConfig

IDS = torch.arange(5, 16)[None]  # with eight more longer than the windows
SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
KINDS: dict[str, Callable[[], Any]] = {
    "full": lambda: LlamaConfig(**SIZES, num_hidden_layers=2),
    "sliding": lambda: MistralConfig(**SIZES, num_hidden_layers=2, sliding_window=4),
    "hybrid": lambda: Gemma3TextConfig(
        **SIZES, num_hidden_layers=3, sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "linear": lambda: Qwen3NextConfig(
        **SIZES, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"],
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, linear_key_head_dim=16, linear_value_head_dim=16,
        linear_num_key_heads=2, linear_num_value_heads=4,
    ),
}  # fmt: skip
GROUPS = {"nbits": 4, "q_group_size": 16, "residual_length": 4}
CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {"cache_implementation": "dynamic"},
    "static": {"cache_implementation": "static"},
    "offloaded": {"cache_implementation": "offloaded"},
    "offloaded_static": {"cache_implementation": "offloaded_static"},
    **{
        name: {"cache_implementation": "quantized", "cache_config": {"backend": name, **more}}
        for name, more in {
            "fp8": {},
            "hqq": {**GROUPS, "axis_key": 1, "axis_value": 1},
            "quanto": GROUPS,
        }.items()
    },
}
HOW: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True},
    "beams": {"num_beams": 3},
}


def needs(cache: str) -> None:
    if cache.startswith("offloaded") and not torch.cuda.is_available():
        pytest.skip("transformers orders the copies of an offloaded cache by CUDA's streams alone")
    if cache == "hqq":
        pytest.importorskip("hqq")
    if cache == "quanto":
        pytest.importorskip("optimum.quanto")


def compare(folder: Path, kind: str, cache: str) -> None:
    needs(cache)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(KINDS[kind]()).save_pretrained(folder)
    config = StowageConfig("nf4", exact=True)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    config = StowageConfig("nf4")
    dense = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config).dequantize()
    more = {"return_dict_in_generate": True, "output_logits": True}
    for name, how in HOW.items():
        found = []
        for one in (model, dense):
            set_seed(1)
            found.append(one.generate(IDS, max_new_tokens=8, **CACHES[cache], **how, **more))
        one, other = found
        assert torch.equal(one.sequences, other.sequences), name
        assert torch.equal(torch.stack(one.logits), torch.stack(other.logits)), name
        assert type(one.past_key_values) is type(other.past_key_values)


# transformers quantizes caches of full attention alone
PAIRS = [
    (kind, cache)
    for kind in KINDS
    for cache, how in CACHES.items()
    if kind == "full" or how["cache_implementation"] != "quantized"
]


@pytest.mark.parametrize(("kind", "cache"), [pair for pair in PAIRS if pair[1] != "quanto"])
def test_it_generates_what_the_plain_one_does(kind: str, cache: str, tmp_path: Path) -> None:
    compare(tmp_path, kind, cache)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_it_generates_with_a_cache_of_quanto(tmp_path: Path) -> None:
    """Which compiles its unpacking when it is first used."""
    compare(tmp_path, "full", "quanto")

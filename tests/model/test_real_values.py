# SPDX-License-Identifier: Apache-2.0
"""save(dtype=): folders that transformers and diffusers open as they are."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from torch import nn

import stowage
from stowage.tensor import StowedTensor

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
}


def config(kind: str) -> Any:
    heads = {"num_key_value_heads": 2}
    t5 = {"d_model": 64, "d_ff": 96, "num_layers": 2, "num_heads": 4, "d_kv": 16, "vocab_size": 128}
    return {
        "llama": lambda: transformers.LlamaConfig(**SMALL, **heads),
        "tied": lambda: transformers.Qwen2Config(**SMALL, **heads, tie_word_embeddings=True),
        "bert": lambda: transformers.BertConfig(**SMALL),
        "t5": lambda: transformers.T5Config(**t5),
        "gpt2": lambda: transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128),
        "experts": lambda: transformers.MixtralConfig(**SMALL, **heads, num_local_experts=4),
    }[kind]()


AUTO = {
    "bert": transformers.AutoModelForMaskedLM,
    "t5": transformers.AutoModelForSeq2SeqLM,
}


def build(kind: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    auto = AUTO.get(kind, transformers.AutoModelForCausalLM)
    return auto.from_config(config(kind), dtype=dtype).eval(), auto


def same_values(model: nn.Module, wanted: nn.Module, dtype: torch.dtype) -> None:
    found = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in wanted.named_parameters(remove_duplicate=False):
        rests = isinstance(parameter, StowedTensor)
        values = parameter.dequantize(dtype) if rests else parameter.to(dtype)
        assert found[name].dtype == dtype and torch.equal(found[name], values), name


@pytest.mark.parametrize("kind", ["llama", "tied", "bert", "t5", "gpt2", "experts"])
def test_row_05_a_saved_model_says_what_it_holds_and_opens_without_us(
    kind: str, tmp_path: Path
) -> None:
    """A peer: the file holds float8, config.json says nothing, the reload widens rounded codes."""
    model, auto = build(kind)
    rules = {"*.experts.*proj": "int8:row2"} if kind == "experts" else None
    assert stowage.stow(model, "f8_e4m3:row", rules=rules).stowed
    assert stowage.save(model, tmp_path, dtype=torch.bfloat16) == tmp_path / "model.safetensors"
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["dtype"] == "bfloat16" and written["architectures"] == [type(model).__name__]
    opened, info = auto.from_pretrained(tmp_path, dtype="auto", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    same_values(opened, model, torch.bfloat16)
    twin = copy.deepcopy(model)
    stowage.unstow(twin)
    ids = {"input_ids": torch.tensor([[1, 2, 3]])}
    if kind == "t5":
        ids["decoder_input_ids"] = ids["input_ids"]
    with torch.no_grad():  # torch's kernels differ with it
        assert torch.equal(opened.eval()(**ids).logits, twin(**ids).logits)
    if kind == "llama":
        assert (tmp_path / "generation_config.json").exists()
    assert stowage.report(model).stowed  # the model itself rests on


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_shards_are_those_of_transformers(dtype: torch.dtype, tmp_path: Path) -> None:
    model, auto = build("llama")
    stowage.stow(model, "nf4")
    index = stowage.save(model, tmp_path, dtype=dtype, shard_bytes=1 << 16)
    assert index == tmp_path / "model.safetensors.index.json"
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    facts = json.loads(index.read_text())
    total = sum(t.numel() for t in model.state_dict().values()) * dtype.itemsize
    assert facts["metadata"]["total_size"] == total
    same_values(auto.from_pretrained(tmp_path, dtype="auto"), model, dtype)
    # A smaller save leaves no shard of the larger one.
    stowage.save(model, tmp_path, dtype=dtype, shard_bytes=1 << 17)
    fewer = {path.name for path in tmp_path.glob("*.safetensors")}
    assert fewer == set(json.loads(index.read_text())["weight_map"].values()) != set(shards)
    stowage.save(model, tmp_path, dtype=dtype)
    assert {path.name for path in tmp_path.glob("*.safetensors*")} == {"model.safetensors"}


@pytest.mark.parametrize("storage", ["f8_e4m3:row", "nf4"])
def test_a_sharded_checkpoint_of_transformers_loads_straight_to_rest(
    storage: str, tmp_path: Path
) -> None:
    model, auto = build("llama")
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    loaded = stowage.load(lambda: auto.from_config(model.config), tmp_path, storage)
    stowage.stow(model, storage)
    for (name, found), wanted in zip(loaded.named_parameters(), model.parameters(), strict=True):
        assert isinstance(found, StowedTensor) == isinstance(wanted, StowedTensor), name
        if isinstance(found, StowedTensor):
            assert torch.equal(found.parts["codes"], wanted.parts["codes"])
        else:
            assert torch.equal(found, wanted)


def test_real_values_in_f32_give_the_same_codes_back(tmp_path: Path) -> None:
    model, auto = build("llama", torch.float32)
    stowage.stow(model, "int8")
    stowage.save(model, tmp_path, dtype=torch.float32)
    again = stowage.load(lambda: auto.from_config(model.config), tmp_path, "int8")
    for found, wanted in zip(again.parameters(), model.parameters(), strict=True):
        if isinstance(wanted, StowedTensor):
            assert torch.equal(found.parts["codes"], wanted.parts["codes"])
            assert torch.equal(found.parts["scale"], wanted.parts["scale"])


def test_a_diffusers_model_opens_as_it_is(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.AutoencoderKL(block_out_channels=(32,), norm_num_groups=8)
    stowage.stow(model, "f8_e4m3:row")
    path = stowage.save(model, tmp_path, dtype=torch.float16)
    assert path == tmp_path / "diffusion_pytorch_model.safetensors"
    opened = diffusers.AutoencoderKL.from_pretrained(tmp_path, torch_dtype=torch.float16)
    same_values(opened, model, torch.float16)


def test_modules_of_no_library_and_fp32_places(tmp_path: Path) -> None:
    class Mixed(nn.Module):
        _keep_in_fp32_modules = ("gate",)

        def __init__(self) -> None:
            super().__init__()
            self.gate, self.body = nn.Linear(8, 8), nn.Linear(8, 8)
            self.register_buffer("count", torch.tensor(3))

    from safetensors.torch import load_file

    model = Mixed()
    stowage.stow(model, "int8")
    stowage.save(model, tmp_path, dtype=torch.bfloat16)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors"]
    found = load_file(tmp_path / "model.safetensors")
    assert found["gate.weight"].dtype == torch.float32
    assert found["body.weight"].dtype == torch.bfloat16 and found["count"].dtype == torch.int64
    assert torch.equal(found["body.weight"], model.body.weight.dequantize(torch.bfloat16))


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    layer = nn.Linear(8, 8)
    layer.weight.data[0, 0] = 1e6
    stowage.stow(layer, rules={"weight": "int8"})
    with pytest.raises(stowage.InvalidArgument, match=r"weight: values must be at most 65504"):
        stowage.save(layer, tmp_path, dtype=torch.float16)
    with pytest.raises(stowage.InvalidArgument, match="dtype must be one of"):
        stowage.save(layer, tmp_path, dtype=torch.int8)
    with pytest.raises(stowage.InvalidArgument, match="meta tensor"):
        stowage.save(nn.Linear(2, 2, device="meta"), tmp_path, dtype=torch.float16)
    model, _ = build("llama")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(stowage.InvalidArgument, match="merge_and_unload"):
        stowage.save(adapted, tmp_path, dtype=torch.float16)
    assert not list(tmp_path.iterdir())

# SPDX-License-Identifier: Apache-2.0
"""A Llama-shaped model: rotary buffers, a head that may be tied, generation, peers' files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import stowage

SCRIPTS = sysconfig.get_path("scripts")
PROGRAM = shutil.which("stowage", path=SCRIPTS) or Path(stowage.__file__).parent / "bin/stowage"
IDS = torch.tensor([[1, 2, 3, 4, 5], [9, 8, 7, 6, 5]])


def config(tied: bool) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        max_position_embeddings=64,
    )


def build(tied: bool) -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config(tied)).eval()


def on_meta(tied: bool) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config(tied)).eval()


@pytest.mark.parametrize("tied", [False, True])
def test_saved_and_loaded_on_meta(tmp_path: Path, tied: bool) -> None:
    model = build(tied)
    report = stowage.stow(model, "nf4", compute_dtype=torch.bfloat16)
    assert len(report.stowed) == 15
    assert (report["lm_head.weight"].storage is not None) == tied
    stowage.save(model, tmp_path)
    expected = model.generate(IDS, max_new_tokens=6, do_sample=False)
    for factory in (build, on_meta):
        loaded = stowage.load(lambda f=factory: f(tied), tmp_path)
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
        assert not any(t.is_meta for t in [*loaded.parameters(), *loaded.buffers()])
        # The rotary frequencies are in no file.
        assert torch.equal(loaded.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)
        assert torch.equal(loaded.generate(IDS, max_new_tokens=6, do_sample=False), expected)


@pytest.mark.parametrize("tied", [False, True])
def test_pack_and_stow_choose_the_same_weights(tmp_path: Path, tied: bool) -> None:
    model = build(tied)
    model.save_pretrained(tmp_path / "theirs")
    command = [PROGRAM, "pack", tmp_path / "theirs", tmp_path / "packed", "--storage", "int8"]
    subprocess.run(command, check=True, capture_output=True)
    packed = stowage.load(lambda: build(tied), tmp_path / "packed")
    report = stowage.stow(model, "int8")
    assert [r.name for r in stowage.report(packed).stowed] == [r.name for r in report.stowed]
    for row in report.stowed:
        mine, theirs = model.get_parameter(row.name), packed.get_parameter(row.name)
        assert torch.equal(mine.parts["codes"], theirs.parts["codes"])
        assert torch.equal(mine.parts["scale"], theirs.parts["scale"])


@pytest.mark.parametrize("storage", ["f8_e4m3:row", "nf4:block64:nested"])
def test_save_pretrained_takes_the_plain_state(tmp_path: Path, storage: str) -> None:
    """Peer defect 05: no file whose values another form would silently replace."""
    model = build(tied=True)
    stowage.stow(model, storage, compute_dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, state_dict=stowage.state_dict(model))
    assert LlamaConfig.from_pretrained(tmp_path).hidden_size == 64
    loaded = stowage.load(lambda: build(True), tmp_path, compute_dtype=torch.bfloat16)
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


@pytest.mark.parametrize("tied", [False, True])
def test_save_pretrained_writes_values(tmp_path: Path, tied: bool) -> None:
    """Shards and an index too, for anybody's `from_pretrained`."""
    model = build(tied)
    stowage.stow(model, "nf4:block64:nested")
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (opened.lm_head.weight is opened.model.embed_tokens.weight) == tied
    stowage.unstow(model)
    found, wanted = opened.state_dict(), model.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_memory_footprint_of_the_report() -> None:
    """transformers counts logical bytes; the report counts what is there."""
    model = build(tied=False)
    report = stowage.stow(model, "nf4")
    assert model.get_memory_footprint() > report.rest_bytes + report.buffer_bytes
    parts = [p for w in model.parameters() for p in getattr(w, "parts", {"plain": w}).values()]
    assert report.rest_bytes == sum(part.nbytes for part in parts)

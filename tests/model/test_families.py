# SPDX-License-Identifier: Apache-2.0
"""Models of many families, stowed by the defaults in every storage: near to fp32, as near as their
dequantized twins, nothing left out in silence, compiled, saved and built again."""

from __future__ import annotations

import copy
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from families import DIFFUSION, FAMILIES, PUBLISHED, STORAGES, answer, relative, unfit
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn.modules.conv import _ConvNd
from transformers import AutoModel

import stowage

BF16, F32 = torch.bfloat16, torch.float32
# The error of the output beside fp32 that each kind of codes may make. Random weights are harsher
# than trained ones, and some models amplify more: the autoencoder has normalization after each
# product, CLIP multiplies its answer by 14.
LIMITS = {"f8_e4m3": 0.13, "f8_e5m2": 0.25, "int8": 0.04, "nf4": 0.45, "fp4": 0.5}
LIMITS |= {"bf16": 0.01, "f16": 0.002, "f32": 1e-5}
LIMITS |= {"mxfp8_e4m3": 0.13, "mxfp8_e5m2": 0.25, "mxint8": 0.04}
LIMITS |= {"mxfp4": 0.53, "nvfp4": 0.45, "int4": 0.45, "q4_k": 0.35}
AMPLIFIES = {"vae": 1.5, "clip": 1.5}
HARSH = {("clip", "mxfp4"): 0.9}  # of four numbers; the largest error of a model and a storage
SHORT = ("f8_e4m3", "int8:row", "nf4:block64:nested", "nvfp4")
# What stays plain, of two and more dimensions: name -> the reason.
TABLES = "the defaults take Linear, Embedding and Conv weights"
DECLARED = "_skip_layerwise_casting_patterns"
PLAIN = {
    "dit": {r"(pos_embed\.proj|norm1\..*)\.weight$": DECLARED},
    "flux": {r"norm\w*\.linear\.weight$": DECLARED},
    "t5 encoder": {r"DenseReluDense\.wo\.weight": "_keep_in_fp32_modules"},
    "t5": {r"DenseReluDense\.wo\.weight": "_keep_in_fp32_modules"},
    "llama": {r"^lm_head\.weight$": "a head"},
    "pixart": {
        r"scale_shift_table$": TABLES,
        r"(pos_embed\.proj|adaln_single\..*linear.*)\.weight$": DECLARED,
    },
    "vit": {r"(cls_token|position_embeddings)$": TABLES},
    "swin": {r"relative_position_bias_table$": TABLES},
    "qwen2_moe": {
        r"mlp\.(gate\.weight|experts\.\w+_proj)$": TABLES,
        r"mlp\.shared_expert_gate\.weight$": "a router",
    },
}


def marked(names: Any, *marks: pytest.MarkDecorator) -> list[Any]:
    """Families as parameters; those of diffusers are slow, since importing it is."""
    slow = [pytest.mark.slow]
    return [pytest.param(n, marks=[*marks, *(slow if n in DIFFUSION else [])]) for n in names]


def stowed(family: str, storage: Any, **how: Any) -> tuple[nn.Module, stowage.Report]:
    model = FAMILIES[family].build()
    return model, stowage.stow(model, storage, **how)


def dense_twin(model: nn.Module) -> nn.Module:
    twin = copy.deepcopy(model)
    stowage.unstow(twin)
    return twin


@pytest.mark.parametrize("family", marked(FAMILIES))
@pytest.mark.parametrize(
    "storage",
    [
        pytest.param(s, marks=[] if s in SHORT else pytest.mark.nightly)
        for s in (*STORAGES, *PUBLISHED)
    ],
)
@torch.no_grad()
def test_error_beside_fp32(family: str, storage: str) -> None:
    batch = FAMILIES[family].batch()
    expected = answer(FAMILIES[family].build(), batch)
    model, report = stowed(family, storage, skip=unfit(storage), allow_unmatched=True)
    found = answer(model, batch)
    of_codes = LIMITS[storage.partition(":")[0]] * AMPLIFIES.get(family, 1)
    limit = HARSH.get((family, storage), of_codes)
    assert limit < 0.95, "zeros err by 1"
    assert relative(found, expected) < limit
    assert relative(found, answer(dense_twin(model), batch)) < 1e-5
    full = stowage.quantize(torch.ones(64, 64), storage).resting
    assert {row.storage for row in report.stowed} == {full}


@pytest.mark.parametrize("family", marked(FAMILIES))
def test_nothing_is_left_out(family: str) -> None:
    model, report = stowed(family, "nf4")
    named = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert {name for row in report.rows for name in (row.name, *row.also)} == named
    expected = PLAIN.get(family, {})
    for row in report.plain:
        assert row.reason, row.name
        if len(row.shape) > 1:
            reasons = [why for name, why in expected.items() if re.search(name, row.name)]
            assert reasons and reasons[0] in row.reason, (row.name, row.reason)
        else:
            assert re.search(r"(bias|norm\w*|weight|logit_scale|class_embedding|\d)$", row.name)
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding | _ConvNd):
            name = f"{path}.weight"
            rests = isinstance(module.weight, stowage.StowedTensor)
            assert rests or any(re.search(plain, name) for plain in expected), name


@pytest.mark.parametrize("family", marked(FAMILIES))
@torch.no_grad()
def test_everything_computes_in_one_dtype(family: str) -> None:
    """Bare parameters and norms follow, so nothing mixes; what a model does when given another
    dtype (T5, CLIP, ViT and others ask a weight for its dtype) is what the dense one does."""
    model, report = stowed(family, "f8_e4m3:row", compute_dtype=BF16)
    wide = {row.name for row in report.rows if row.compute != "bfloat16"}
    assert all(report[name].reason.endswith("_keep_in_fp32_modules") for name in wide)
    assert answer(model, FAMILIES[family].batch(BF16)).dtype == BF16
    outcomes = []
    for run in (dense_twin(model), model):
        try:
            outcomes.append(str(answer(run, FAMILIES[family].batch(F32)).dtype))
        except RuntimeError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("family", marked(FAMILIES))
@pytest.mark.parametrize("storage", ["f8_e4m3", pytest.param("nf4", marks=pytest.mark.nightly)])
def test_modes(family: str, storage: str) -> None:
    model, _ = stowed(family, storage)
    twin, batch = dense_twin(model), FAMILIES[family].batch()
    with torch.inference_mode():
        assert relative(answer(model, batch), answer(twin, batch)) < 1e-5
        with torch.autocast("cpu", BF16):
            assert relative(answer(model, batch), answer(twin, batch)) < 0.05
    answer(model.train(), batch).float().square().mean().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert grads and all(torch.isfinite(grad).all() for grad in grads)


COMPILED = ("dit", "t5 encoder")


@pytest.mark.parametrize(
    "family",
    [
        *marked(COMPILED, pytest.mark.slow),
        *marked([f for f in FAMILIES if f not in COMPILED], pytest.mark.nightly),
    ],
)
@torch.no_grad()
def test_compiles_into_one_graph(family: str) -> None:
    model, report = stowed(family, "f8_e4m3:row", compute_dtype=BF16)
    batch, graphs = FAMILIES[family].batch(BF16), []

    def count(graph: torch.fx.GraphModule, inputs: object) -> Any:
        graphs.append(Counter(str(node.target) for node in graph.graph.nodes))
        return graph.forward

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=count, inference_compiler=count)
    found = answer(torch.compile(model, backend=backend, fullgraph=True), batch)
    assert relative(found, answer(model, batch)) < 0.01
    assert len(graphs) == 1
    calls = sum(n for name, n in graphs[0].items() if name.startswith("stowage."))
    assert calls >= len(report.stowed)


@torch.no_grad()
def test_t5_computes_in_bf16_around_its_fp32_layers() -> None:
    """T5 casts to `wo.weight.dtype`; a float8 weight would have been its end."""
    model, _ = stowed("t5", "int8", compute_dtype=BF16)
    assert model.encoder.block[0].layer[1].DenseReluDense.wo.weight.dtype == F32
    assert answer(model, FAMILIES["t5"].batch()).dtype == BF16
    model, report = stowed("t5", "f8_e4m3", rules={"*.wo.weight": "f8_e4m3"}, compute_dtype=BF16)
    assert report["encoder.block.0.layer.1.DenseReluDense.wo.weight"].storage == "f8_e4m3"
    assert torch.isfinite(answer(model, FAMILIES["t5"].batch())).all()


RULES = {"qwen2_moe": {"*.experts.*_proj": "int8:row2"}}


SAVED = {"t5": 31, "swin": 14, "whisper": 37, "qwen2_moe": 19, "gemma2": 15, "vit": 14}
SAVED |= {"unet": 83, "dit": 14, "flux": 41, "vae": 38}


@pytest.mark.parametrize("family", marked(SAVED))
@torch.no_grad()
def test_saved_and_built_again(tmp_path: Path, family: str) -> None:
    model, report = stowed(family, "nf4", rules=RULES.get(family))
    assert len(report.stowed) == SAVED[family]
    batch = FAMILIES[family].batch()
    expected = answer(model, batch)
    stowage.save(model, tmp_path)

    def build() -> nn.Module:
        library = type(model) if family in DIFFUSION else AutoModel
        return library.from_config(model.config)

    loaded = stowage.load(build, tmp_path).eval()
    assert torch.equal(answer(loaded, batch), expected)
    assert torch.allclose(answer(dense_twin(model), batch), expected, atol=1e-4)

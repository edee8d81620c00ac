# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts, whose weights are bare three-dimensional parameters of their modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import stowage
from stowage._ops.library import composite_forced

transformers = pytest.importorskip("transformers")


def tiny(kind: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=4,
        num_experts_per_tok=2, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


@pytest.mark.skipif(composite_forced(), reason="exact=True needs the kernels")
@pytest.mark.parametrize("storage", ["int8:row2", "f8_e4m3:row", "nf4"])
@pytest.mark.parametrize("kind", ["Mixtral", "GptOss"])
def test_experts_rest_by_a_rule(kind: str, storage: str) -> None:
    model, ids = tiny(kind), torch.arange(12).view(2, 6)
    experts = {n for n, p in model.named_parameters() if ".experts." in n and p.dim() == 3}
    assert len(experts) >= 4
    rule = {"*.experts.*_proj": storage}
    report = stowage.stow(model, "f8_e4m3:row", rules=rule, exact=True)
    assert experts <= {row.name for row in report.stowed}
    assert all(report[name].storage.startswith(storage) for name in experts)
    twin = copy.deepcopy(model)
    stowage.unstow(twin)
    with torch.no_grad():
        got, wanted = model(ids).logits, twin(ids).logits
    assert torch.equal(got, wanted)


# What transformers calls for the experts: an index, a grouped product, a gather and bmm.
WAYS = ["eager", "grouped_mm", "batched_mm"]


@pytest.mark.parametrize(
    "storage",
    [
        *("nf4", "mxfp4", "mxfp4:transposed", "nvfp4", "int4:block32", "f8_e4m3:row2"),
        "f8_e4m3:block128x128",
    ],
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["Mixtral", "GptOss"])
def test_no_way_through_the_experts_dequantizes_all_of_them(
    kind: str, way: str, storage: str
) -> None:
    """Below autograd nothing asks for a whole weight: `fallbacks` would count it."""
    model, ids = tiny(kind), torch.arange(12).view(2, 6)
    stowage.stow(model, "int8", rules={"*.experts.*_proj": storage})
    twin = copy.deepcopy(model)
    stowage.unstow(twin)
    for each in (model, twin):
        each.set_experts_implementation(way)
    stowage.fallbacks(clear=True)
    embeddings = model.get_input_embeddings()(ids).detach()
    pairs = []
    for each in (model, twin):
        x = embeddings.clone().requires_grad_()
        logits = each(inputs_embeds=x).logits
        pairs.append((logits, *torch.autograd.grad(logits.square().sum(), x)))
    assert stowage.fallbacks() == {}
    for got, wanted in zip(*pairs, strict=True):
        assert float((got - wanted).detach().norm()) <= 1e-3 * float(wanted.detach().norm())

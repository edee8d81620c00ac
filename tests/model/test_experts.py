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


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["Mixtral", "GptOss"])
def test_no_way_through_the_experts_dequantizes_all_of_them(kind: str, way: str) -> None:
    """Below autograd nothing asks for a whole weight: `fallbacks` would count it."""
    model, ids = tiny(kind), torch.arange(12).view(2, 6)
    stowage.stow(model, "int8", rules={"*.experts.*_proj": "nf4"})
    twin = copy.deepcopy(model)
    stowage.unstow(twin)
    for each in (model, twin):
        each.set_experts_implementation(way)
    stowage.fallbacks(clear=True)
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
    got = model(inputs_embeds=embeddings).logits
    got.sum().backward()
    assert stowage.fallbacks() == {}
    torch.testing.assert_close(got, twin(ids).logits, rtol=1e-3, atol=1e-3)
    assert embeddings.grad is not None and bool(embeddings.grad.isfinite().all())

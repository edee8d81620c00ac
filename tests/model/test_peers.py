# SPDX-License-Identifier: Apache-2.0
"""Libraries that take models apart, given stowed ones: PEFT, accelerate."""

from __future__ import annotations

import copy
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import stowage
from stowage.tensor import StowedTensor

pytestmark = pytest.mark.slow
IDS = torch.tensor([[1, 2, 3, 4, 5], [9, 8, 7, 6, 5]])


def llama(storage: str) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = AutoModelForCausalLM.from_config(config)
    stowage.stow(model, storage)
    return model


def dense_twin(model: nn.Module) -> nn.Module:
    twin = copy.deepcopy(model)
    stowage.unstow(twin)
    return twin


def train(model: nn.Module, targets: list[str]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of a few LoRA steps, and the adapters' gradients of the first."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(target_modules=targets, r=4, lora_dropout=0.0, task_type="CAUSAL_LM")
    adapted, losses, gradients = peft.get_peft_model(model, config), [], {}
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    for step in range(4):
        loss = adapted(input_ids=IDS, labels=IDS).loss
        loss.backward()
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in trained.items()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, gradients


@pytest.mark.parametrize("storage", ["nf4", "f8_e4m3:row"])
def test_lora_trains_as_on_the_dequantized_model(storage: str) -> None:
    model = llama(storage)
    targets = ["q_proj", "v_proj", "down_proj"]
    twin = dense_twin(model)
    codes = {
        n: p.parts["codes"].clone() for n, p in model.named_parameters() if hasattr(p, "parts")
    }
    losses, gradients = train(model, targets)
    expected, wanted = train(twin, targets)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < losses[0]
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, wanted[name], rtol=1e-3, atol=1e-6)
    for name, weight in model.named_parameters():  # the base rests, bit for bit
        if isinstance(weight, StowedTensor):
            assert torch.equal(weight.parts["codes"], codes[name.replace(".base_layer", "")])


def test_accelerate_offload_to_memory_is_exact_and_to_disk_refused(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = llama("nf4").eval()
    expected = model(IDS).logits
    offloaded = accelerate.cpu_offload(copy.deepcopy(model), torch.device("cpu"))
    assert offloaded.model.layers[0].mlp.up_proj.weight.device.type == "meta"
    assert torch.equal(offloaded(IDS).logits, expected)
    with pytest.raises(stowage.Unsupported, match="stowed tensor"):
        accelerate.disk_offload(copy.deepcopy(model), str(tmp_path), torch.device("cpu"))

# SPDX-License-Identifier: Apache-2.0
"""What single ranks do in the tests of models of transformers and PEFT in fp8 under FSDP2."""

import copy
from typing import Any

import torch
from float8_ranks import plain
from torch import nn
from torch.distributed.fsdp import fully_shard

from stowage.training import TrainedWeight, convert_float8, refresh_scales


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64}
    config = LlamaConfig(num_hidden_layers=2, num_attention_heads=4, **sizes)
    return LlamaForCausalLM(config)


def adapted() -> Any:
    """Frozen fp8 weights with trainable plain adapters beside."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)  # zeros would give the other one no gradient
    return model


def trained(kind: str, recipe: str) -> tuple[list[str], int, int]:
    """Three steps beside those of the whole model: what differs, the number of fp8 weights, and
    how many frozen parameters the steps have changed."""
    made = {"llama": llama, "peft": adapted}[kind]()
    whole = convert_float8(made, recipe, filter=lambda name, module: "lora" not in name)
    before = {n: plain(p).clone() for n, p in whole.named_parameters() if not p.requires_grad}
    parts = copy.deepcopy(whole)
    layers = (parts.base_model.model if kind == "peft" else parts).model.layers
    for layer in layers:
        fully_shard(layer)
    fully_shard(parts)
    optimizers = [
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], 1e-2, foreach=False)
        for m in (whole, parts)
    ]
    wrong = []
    for step in range(3):
        ids, losses = torch.randint(64, (2, 8)), []
        for model, optimizer in zip((whole, parts), optimizers, strict=True):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            refresh_scales(model)
        if losses[0] != losses[1]:
            wrong.append(f"step {step}: {losses}")
    pairs = zip(whole.named_parameters(), parts.parameters(), strict=True)
    after = {name: (plain(a), plain(b)) for (name, a), b in pairs}
    wrong += [name for name, (a, b) in after.items() if not torch.equal(a, b)]
    changed = sum(not torch.equal(x, after[name][1]) for name, x in before.items())
    count = sum(
        type(m.weight) is TrainedWeight for m in whole.modules() if isinstance(m, nn.Linear)
    )
    return wrong, count, changed

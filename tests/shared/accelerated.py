# SPDX-License-Identifier: Apache-2.0
"""A model at rest with adapters, trained by accelerate's Accelerator."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch

IDS = torch.arange(8 * 16).view(8, 16) % 64
STEPS = 3


def written(folder: Path) -> Path:
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def trained(
    folder: str, state: str, precision: str = "no", exact: bool = False, dense: bool = False
) -> tuple[list[float], list[bool], str]:
    """Losses of some steps; whether what came after a `save_state` comes again after its
    `load_state`; how the model was prepared."""
    import peft
    import torch.distributed as dist
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState
    from transformers import AutoModelForCausalLM

    from stowage.integrations.transformers import StowageConfig

    if dist.is_initialized():  # as a launcher tells it
        rank, world = str(dist.get_rank()), str(dist.get_world_size())
        os.environ.update({"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world})
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})  # it runs already
    AcceleratorState._reset_state(True)
    PartialState._reset_state()
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    config = StowageConfig("nf4", exact=exact)
    base = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    torch.manual_seed(1)
    lora = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model: Any = peft.get_peft_model(base.dequantize() if dense else base, lora)
    optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    each = len(IDS) // accelerator.num_processes
    mine = IDS[accelerator.process_index * each :][:each]

    def steps() -> list[float]:
        losses = []
        for _ in range(STEPS):
            loss = model(input_ids=mine, labels=mine).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
        return losses

    losses = steps()
    accelerator.save_state(state)
    further = steps()
    accelerator.load_state(state)
    again = steps()
    return losses, [a == b for a, b in zip(further, again, strict=True)], type(model).__name__

# SPDX-License-Identifier: Apache-2.0
"""A small model, the adapters that PEFT merges into it, and what a merge must give."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import stowage
from stowage.tensor import StowedTensor

peft = pytest.importorskip("peft")

LINEAR = ["q", "down"]
IDS = torch.tensor([[1, 5, 39], [0, 3, 3]])


class Net(nn.Module):
    """Every kind of base layer that PEFT merges into, a head, and a tie."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 64)
        self.q, self.down = nn.Linear(64, 64), nn.Linear(64, 48)
        self.conv = nn.Conv1d(64, 64, 3, padding=1)
        self.classifier = nn.Linear(48, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        hidden = hidden + torch.relu(self.q(hidden))
        hidden = hidden + self.conv(hidden.transpose(1, 2)).transpose(1, 2)
        return self.classifier(self.down(hidden))


CONFIGS: dict[str, Any] = {
    "lora": peft.LoraConfig(target_modules=[*LINEAR, "embed", "conv"], init_lora_weights=False),
    "bias": peft.LoraConfig(target_modules=LINEAR, lora_bias=True, init_lora_weights=False),
    "dora": peft.LoraConfig(
        target_modules=[*LINEAR, "conv"], use_dora=True, init_lora_weights=False
    ),
    "loha": peft.LoHaConfig(target_modules=[*LINEAR, "conv"], init_weights=False),
    "lokr": peft.LoKrConfig(target_modules=LINEAR, init_weights=False),
    "ia3": peft.IA3Config(
        target_modules=LINEAR, feedforward_modules=["down"], init_ia3_weights=False
    ),
    "vera": peft.VeraConfig(target_modules=["q"], init_weights=False),
    "oft": peft.OFTConfig(target_modules=LINEAR, oft_block_size=16, init_weights=False),
    "boft": peft.BOFTConfig(target_modules=LINEAR, boft_block_size=4, init_weights=False),
}


def adapted(storage: str | None, kind: str = "lora", dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = Net().to(dtype)
    if storage:
        stowage.stow(model, storage)
    torch.manual_seed(1)
    return peft.get_peft_model(model, copy.deepcopy(CONFIGS[kind])).eval()


def octets(model: nn.Module) -> dict[str, bytes]:
    """Everything that the model holds, adapters too."""
    found = {}
    for name, parameter in model.named_parameters():
        stowed = isinstance(parameter, StowedTensor)
        parts = parameter.parts if stowed else {"": parameter.detach()}
        for part, tensor in parts.items():
            raw = tensor.contiguous().reshape(-1).view(torch.uint8)
            found[f"{name}.{part}"] = raw.numpy().tobytes()
    return found


def merged_by_peft(model: Any, adapters: list[str] | None = None) -> dict[str, torch.Tensor]:
    """The oracle: PEFT's own merge into fp32 copies of the dequantized weights."""
    twin = copy.deepcopy(model)
    stowage.unstow(twin, torch.float32)
    twin.merge_adapter(adapters)
    return {n: p.detach() for n, p in twin.named_parameters()}


def base_octets(model: nn.Module) -> dict[str, bytes]:
    """The same without the adapters."""
    return {name: raw for name, raw in octets(model).items() if "lora" not in name}


def layers(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, peft.tuners.tuners_utils.BaseTunerLayer)]

# SPDX-License-Identifier: Apache-2.0
"""A model as QLoRA trains it, of every kind of weight: frozen nf4 with adapters, trainable bf16,
and layers whose gathers carry fp8."""

from typing import Any

import torch
from sharded import Adapted, bases, flat_bytes, shard, train
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.checkpoint import checkpoint

import stowage
from stowage.training import convert_float8

WIDTH = 33


class Mixed(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.frozen = Adapted(WIDTH, 7)
        self.plain = nn.Linear(7, 5)
        self.fast = nn.Linear(5, WIDTH)
        self.recompute = recompute

    def _forward(self, x: Tensor) -> Tensor:
        return x + self.fast(torch.tanh(self.plain(self.frozen(x))))

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(torch.bfloat16)
        if self.recompute:
            return checkpoint(self._forward, x, use_reentrant=False)
        return self._forward(x)


def model_of(recompute: bool, recipe: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Mixed(recompute), Mixed(recompute)).to(torch.bfloat16)
    stowage.stow(model, rules={"*.base.weight": "nf4:nested"})
    convert_float8(model, recipe, filter=lambda name, _: name.endswith("fast"))
    return model


def losses(mesh: Any, cases: list[tuple[str, bool, bool]]) -> list[tuple[list[float], list[float]]]:
    """Of each recipe, with and without recomputing and offloading: unsharded, and sharded. Frozen
    bytes stay what they were, and nothing is widened as a whole."""
    found = []
    for recipe, recompute, offload in cases:
        want = train(model_of(False, recipe), WIDTH)
        model = model_of(recompute, recipe)
        before = {name: flat_bytes(weight) for name, weight in bases(model).items()}
        options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
        shard(model, mesh, **options)
        stowage.fallbacks(clear=True)
        got = train(model, WIDTH)
        assert not stowage.fallbacks(), stowage.fallbacks()
        for name, weight in bases(model).items():
            assert flat_bytes(weight) == before[name], name
        found.append((want, got))
    return found

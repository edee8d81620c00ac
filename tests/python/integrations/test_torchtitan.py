# SPDX-License-Identifier: Apache-2.0
"""torchtitan's way to a model: a converted configuration is built on the meta device, gets memory,
and is initialised. The layers of its own models need triton; those of these tests do not."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stowage.training import convert_float8
from stowage.training.trained_weight import TrainedWeight

protocols = pytest.importorskip("torchtitan.protocols.model")
titan = pytest.importorskip("stowage.integrations.torchtitan")
Module = pytest.importorskip("torchtitan.protocols.module").Module

LOOPS = Path(__file__).resolve().parents[3] / "docs/loops.md"
X = torch.linspace(-1, 1, 4 * 32).view(4, 32)


class Linear(nn.Linear, Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        in_features: int
        out_features: int

    def __init__(self, config: Config) -> None:
        super().__init__(config.in_features, config.out_features)


class Net(protocols.BaseModel):
    @dataclass(kw_only=True, slots=True)
    class Config(protocols.BaseModel.Config):
        up: Linear.Config
        down: Linear.Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up, self.down = config.up.build(), config.down.build()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def config() -> Net.Config:
    up, down = ((32, 64), (64, 16))
    layers = [Linear.Config(in_features=i, out_features=o) for i, o in (up, down)]
    return Net.Config(up=layers[0], down=layers[1])


def initialised(of: Any) -> nn.Module:
    """As torchtitan's trainer does it."""
    with torch.device("meta"):
        model = of.build()
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states()
    return model


def trained(model: nn.Module) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        model(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_configuration_builds_what_trains_in_fp8(recipe: str) -> None:
    said = titan.Float8Converter.Config(recipe=recipe, skip=["d*n"])
    converted = said.build().convert(config())
    assert isinstance(converted, Net.Config) and converted.to_dict() == config().to_dict()
    model = initialised(converted)
    assert isinstance(model.up.weight.data, TrainedWeight) and isinstance(model.up, Linear)
    assert not isinstance(model.down.weight.data, TrainedWeight)
    model.verify_module_protocol()
    want = convert_float8(initialised(config()), recipe, filter=lambda name, _: name == "up")
    for one, other in zip(trained(model), trained(want), strict=True):
        assert torch.equal(one, other)
    plain = trained(initialised(config()))
    assert not torch.equal(plain[0], trained(model)[0])


def test_the_listing() -> None:
    pytest.importorskip("torchtitan.models.llama3", reason="torchtitan's models import triton")
    listing = re.findall(r"^```python\n(.*?)^```", LOOPS.read_text(), re.S | re.M)[-1]
    exec(listing, {})

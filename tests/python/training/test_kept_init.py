# SPDX-License-Identifier: Apache-2.0
"""Modules made resting: their values, exact and at rest, are those of the plain model."""

from __future__ import annotations

import pytest
import torch
from kept_models import made, plain, same_bytes
from torch import Tensor, nn

import stowage
from stowage.tensor import StowedTensor
from stowage.training import (
    has_init_value,
    init_value,
    init_values,
    quantized_init,
)

STORAGES = ["f8_e4m3:tensor", "f8_e4m3:row", "int8:block32", "nf4", "nf4:nested", "bf16"]


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("storage", STORAGES)
def test_values_and_random_stream_are_those_of_the_plain_model(storage: str, keeps: bool) -> None:
    want = plain(late=keeps)
    after = torch.rand(3)
    model = made(storage, keeps)
    assert torch.equal(after, torch.rand(3))
    assert model.head.weight is model.table.weight
    for (name, p), (_, q) in zip(model.named_parameters(), want.named_parameters(), strict=True):
        assert p.requires_grad and isinstance(p, nn.Parameter)
        if name.endswith("bias"):
            assert torch.equal(p, q)
            continue
        assert (
            isinstance(p, StowedTensor) and p.resting == stowage.quantize(q.data, storage).resting
        )
        assert same_bytes(p, q.data), name
        assert has_init_value(p) == keeps
        if keeps:
            assert torch.equal(init_value(p), q.data), name


def test_gradients_reach_weights_that_were_made_resting() -> None:
    model = made()
    model(torch.arange(8)).square().sum().backward()
    for name, p in model.named_parameters():
        assert (p.grad is not None) == (not name.startswith("conv")), name


def test_meta_then_to_empty_then_init() -> None:
    torch.manual_seed(5)
    want = nn.Linear(16, 8)
    with quantized_init("int8", preserve_init=True):
        with torch.device("meta"):
            layer = nn.Linear(16, 8)
        assert layer.weight.is_meta and init_values(layer)[0].state == "unset"
        assert init_values(layer)[0].nbytes == 0
        layer.to_empty(device="cpu")
        torch.manual_seed(5)
        layer.reset_parameters()
    assert torch.equal(init_value(layer.weight), want.weight.data)
    assert same_bytes(layer.weight, want.weight.data)


def test_filter_chooses_and_grouped_weights_are_kept() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(3, 4, 8))
            self.gate = nn.Parameter(torch.randn(3, 8))

    torch.manual_seed(1)
    want = Experts()

    def filter(name: str, module: nn.Module, parameter: Tensor) -> str | None:
        return "f8_e4m3:row2" if name == "up" else None

    torch.manual_seed(1)
    with quantized_init("nf4", preserve_init=True, filter=filter):
        got = Experts()
    assert isinstance(got.up, StowedTensor) and not isinstance(got.gate, StowedTensor)
    assert torch.equal(init_value(got.up), want.up.data) and torch.equal(got.gate, want.gate)


def test_inside_copies_replace_the_kept_value() -> None:
    values = torch.randn(8, 16)
    with quantized_init("f8_e4m3:tensor", preserve_init=True):
        layer = nn.Linear(16, 8)
        layer.load_state_dict({"weight": values, "bias": torch.zeros(8)})
    assert torch.equal(init_value(layer.weight), values) and same_bytes(layer.weight, values)


def test_none_switches_it_off_and_what_is_outside_stays_plain() -> None:
    with quantized_init("nf4", preserve_init=True):
        with quantized_init(None):
            inner = nn.Linear(4, 4)
        outer = nn.Linear(4, 4)
    assert not isinstance(inner.weight, StowedTensor) and isinstance(outer.weight, StowedTensor)
    assert not isinstance(nn.Linear(4, 4).weight, StowedTensor)


def test_values_that_never_became_finite_are_named() -> None:
    with (
        pytest.raises(ValueError, match=r"inf or NaN in Linear.weight \[2, 3\]"),
        quantized_init("f8_e4m3:tensor", preserve_init=True),
    ):
        layer = nn.Linear(3, 2)
        layer.weight.data[1, 1] = float("nan")
    assert not has_init_value(layer.weight)

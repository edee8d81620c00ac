# SPDX-License-Identifier: Apache-2.0
"""Merging adapters: all or nothing, seeded rounding, masters, pickles, nested layers."""

from __future__ import annotations

import copy
import os
import pickle
import warnings

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from mergeable import (
    CONFIGS,
    IDS,
    Net,
    adapted,
    base_octets,
    layers,
    merged_by_peft,
    octets,
)
from torch import nn

import stowage
from stowage._ops.numbers import stochastic
from stowage._ops.storage import Storage
from stowage.tensor import StowedTensor

peft = pytest.importorskip("peft")
from stowage.integrations import peft as stowed_peft  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("storage", ["f8_e4m3", "f8_e5m2:row", "int8", "nf4", "fp4", "bf16"])
def test_stochastic_rounding_is_seeded_and_takes_a_neighbour(storage: str) -> None:
    kept, codes = adapted(storage), []
    for seed in (1, 1, 2):
        model = copy.deepcopy(kept)
        with torch.random.fork_rng():
            torch.manual_seed(len(codes))  # torch's own generator has no part in it
            stowed_peft.merge(model, rounding="stochastic", seed=seed)
        codes.append(octets(model))
    assert codes[0] == codes[1] != codes[2]
    wanted = merged_by_peft(kept)
    name = "base_model.model.q.base_layer.weight"
    parts = stochastic.quantize(wanted[name], Storage(storage), stochastic.key_of(2, "q.weight"))
    assert codes[2][f"{name}.codes"] == parts[0].reshape(-1).view(torch.uint8).numpy().tobytes()


def test_small_deltas_survive_in_the_mean_where_nearest_loses_them() -> None:
    model = adapted("f8_e4m3")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.fill_(0.0)
        if "lora_A" in name:
            parameter.data.fill_(0.01)
    weight = model.base_model.model.q.base_layer.weight
    model.base_model.model.q.lora_B["default"].weight.data.fill_(1e-3)
    values = weight.dequantize()
    delta = model.base_model.model.q.get_delta_weight("default").mean().item()
    moved = {}
    for rounding in ("nearest", "stochastic"):
        stowed_peft.merge(model, rounding=rounding, seed=4)
        moved[rounding] = (weight.dequantize() - values).mean().item()
        stowed_peft.unmerge(model)
    assert moved["stochastic"] == pytest.approx(delta, rel=0.5)
    assert abs(moved["stochastic"] - delta) < abs(moved["nearest"] - delta)


def test_merge_and_unload_leaves_a_resting_model() -> None:
    model = adapted("nf4", "dora")
    wanted = copy.deepcopy(model)
    stowed_peft.merge(wanted)
    values = wanted(IDS)
    plain = stowed_peft.merge_and_unload(model)
    assert isinstance(plain, Net) and isinstance(plain.q.weight, StowedTensor)
    assert torch.equal(plain(IDS), values) and not layers(plain)


def test_a_failing_merge_changes_nothing() -> None:
    model = adapted("int8")
    before = octets(model)
    conv = model.base_model.model.conv
    conv.lora_B["default"].weight.data[0] = torch.inf
    broken = octets(model)
    for place in ("ram", "disk"):
        with pytest.raises(stowage.InvalidArgument, match="finite"):
            stowed_peft.merge(model, keep=place)
        assert octets(model) == broken and not any(layer.merged for layer in layers(model))
    conv.lora_B["default"].weight.data[0] = 0.0
    model.add_adapter("bad", copy.deepcopy(CONFIGS["lora"]))
    conv.lora_B["bad"].weight.data[0] = torch.nan
    stowed_peft.merge(model)
    merged = base_octets(model)
    with pytest.raises(stowage.InvalidArgument, match="finite"):
        stowed_peft.merge(model, ["bad"])
    assert base_octets(model) == merged
    stowed_peft.unmerge(model)
    assert base_octets(model) == {n: b for n, b in before.items() if "lora" not in n}


def test_a_weight_written_while_merged_is_not_overwritten() -> None:
    model = adapted("int8")
    stowed_peft.merge(model)
    model.base_model.model.q.base_layer.weight.data[0] = 0.5
    written = octets(model)
    with pytest.raises(stowage.InvalidArgument, match=r"q\.weight: must not be written"):
        stowed_peft.unmerge(model)
    assert octets(model) == written


def test_merging_keeps_the_master_of_the_base() -> None:
    """A merged weight has a stale master; taking the adapter out makes it fresh again."""
    torch.manual_seed(0)
    base = Net()
    original = base.q.weight.detach().clone()
    stowage.stow(base, "nf4", keep_master="ram")
    model = peft.get_peft_model(base, copy.deepcopy(CONFIGS["lora"]))
    stowed_peft.merge(model)
    assert stowage.report(model)["base_model.model.q.base_layer.weight"].master == "stale"
    stowed_peft.unmerge(model)
    stowage.unstow(model)
    weight = model.base_model.model.q.base_layer.weight
    assert torch.equal(weight, original) and not weight.requires_grad


def test_a_pickle_of_a_merged_model_stays_merged() -> None:
    model = adapted("int8")
    stowed_peft.merge(model)
    twin = pickle.loads(pickle.dumps(model))
    assert octets(twin) == octets(model)
    with pytest.raises(stowage.InvalidArgument, match="must be kept"):
        stowed_peft.unmerge(twin)
    twin.unmerge_adapter()  # PEFT's own, which rounds
    stowed_peft.unmerge(model)


@pytest.mark.parametrize("storage", ["int8:row", "nf4"])
def test_attention(storage: str) -> None:
    """MultiheadAttention has a layer inside a layer."""
    attention = nn.MultiheadAttention(32, 4, batch_first=True)
    stowage.stow(attention, rules={"*_proj*weight": storage})
    model = peft.get_peft_model(
        nn.Sequential(attention), peft.LoraConfig(target_modules=["0"], init_lora_weights=False)
    )
    before, wanted = octets(model), merged_by_peft(model)
    stowed_peft.merge(model)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, StowedTensor):
            expected = stowage.quantize(wanted[name], storage).dequantize()
            assert torch.equal(parameter.dequantize(), expected)
    stowed_peft.unmerge(model)
    assert octets(model) == before


class Experts(nn.Module):
    """Two raw parameters, which PEFT wraps one around the other."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(3, 32, 32)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(torch.bmm(x, self.up), self.down)


@pytest.mark.parametrize("storage", ["int8:row2", "nf4"])
def test_experts(storage: str) -> None:
    model = nn.Sequential(Experts())
    stowage.stow(model, rules={"*": storage})
    names = ["0.up", "0.down"]
    config = peft.LoraConfig(target_parameters=names, r=2, init_lora_weights=False)
    model = peft.get_peft_model(model, config).eval()
    x = torch.randn(3, 4, 32)
    before, wanted, apart = octets(model), merged_by_peft(model), model(x)
    assert len(stowed_peft.merge(model)) == 2
    resting = {n: p for n, p in model.named_parameters() if isinstance(p, StowedTensor)}
    assert len(resting) == 2
    for name, parameter in resting.items():
        expected = stowage.quantize(wanted[name], storage).dequantize()
        assert torch.equal(parameter.dequantize(), expected)
    stowed_peft.unmerge(model)
    assert octets(model) == before and torch.equal(model(x), apart)


def test_a_merged_model_may_change_its_dtype() -> None:
    model = adapted("nf4")
    before = octets(model)
    stowed_peft.merge(model)
    model.to(torch.bfloat16)
    stowed_peft.unmerge(model)
    found = octets(model)
    resting = [name for name in before if "base_layer.weight" in name]
    assert resting and all(found[name] == before[name] for name in resting)


def test_arguments_are_checked() -> None:
    model = adapted("int8")
    for wrong in ({"rounding": "up"}, {"keep": "tape"}, {"folder": "x"}):
        with pytest.raises(stowage.InvalidArgument, match=next(iter(wrong))):
            stowed_peft.merge(model, **wrong)
    with pytest.raises(stowage.InvalidArgument, match="must have adapters"):
        stowed_peft.merge(nn.Linear(2, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert stowed_peft.unmerge(model) == []

# SPDX-License-Identifier: Apache-2.0
"""keep_master: unstow gives back the exact original, and never a stale one."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tied import IDS, Tied, bits, bits_at_rest
from torch import nn

import stowage
from stowage.tensor import StowedTensor

STORAGES = ["bf16", "f8_e4m3", "f8_e4m3:row", "int8:block64", "nf4", "nf4:block64:nested", "fp4"]
PLACES = ["ram", "disk"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("storage", STORAGES)
def test_unstow_gives_the_exact_original_back(storage: str, place: str) -> None:
    model = Tied()
    before = bits(model)
    report = stowage.stow(model, storage, compute_dtype=torch.bfloat16, keep_master=place)
    assert isinstance(model.embed.weight, StowedTensor)
    assert model.norm.weight.dtype == model.scale.dtype == torch.bfloat16
    assert report["embed.weight"].master == place and report["norm.weight"].master == place
    assert report["body.weight"].master_bytes == 33 * 33 * 4
    assert f"masters ({place}) take" in str(report)
    model(IDS)
    report = stowage.unstow(model)
    assert bits(model) == before
    assert model.lm_head.weight is model.embed.weight
    assert report["embed.weight"].reason.startswith("its exact original, from ")
    assert report.master_bytes == 0 and report["embed.weight"].master is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_and_odd_bits_come_back(dtype: torch.dtype) -> None:
    """Negative zero and subnormals, which a storage would not keep."""
    layer = nn.Linear(8, 4, dtype=dtype)
    layer.weight.data[0, :2] = torch.tensor([-0.0, 1e-40], dtype=dtype)
    before = bits(layer)
    for place in PLACES:
        stowage.stow(layer, "nf4", keep_master=place)
        stowage.unstow(layer)
        assert bits(layer) == before


def test_row_04_casting_is_undone_and_done_twice() -> None:
    """A peer: remove raises NotImplementedError, a second enable raises ValueError."""
    model = Tied()
    before = bits(model)
    stowage.stow(model, "f8_e4m3", keep_master="ram")
    resting = bits_at_rest(model)
    report = stowage.stow(model, "f8_e4m3", keep_master="ram")
    assert report["body.weight"].reason == "rested already"
    assert report["body.weight"].master == "ram" and bits_at_rest(model) == resting
    stowage.unstow(model)
    stowage.unstow(model)
    assert bits(model) == before


def test_without_a_master_unstow_is_lossy_and_says_so() -> None:
    model = Tied()
    stowage.stow(model, "nf4")
    values_at_rest = model.body.weight.dequantize()
    report = stowage.unstow(model)
    assert torch.equal(model.body.weight, values_at_rest) and not model.body.weight.requires_grad
    assert report["body.weight"].reason == "dequantized: no master"


def fill(weight: torch.Tensor) -> None:
    weight.data[3] = 0.25


def exchange(weight: torch.Tensor) -> None:
    weight.data[[0, 5]] = weight.data[[5, 0]].clone()  # a sum over the bytes does not see it


def negate(weight: torch.Tensor) -> None:
    weight.data[2:4].neg_()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("storage", ["f8_e4m3", "f8_e4m3:row", "int8", "nf4:block32"])
@pytest.mark.parametrize("write", [fill, exchange, negate])
def test_a_written_weight_never_gets_its_stale_master(
    write: Callable[[torch.Tensor], None], storage: str, place: str
) -> None:
    model = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 8))
    original = model[1].weight.detach().clone()
    stowage.stow(model, storage, keep_master=place)
    write(model[0].weight)
    written = model[0].weight.dequantize()
    assert stowage.report(model)["0.weight"].master == "stale"
    report = stowage.unstow(model)
    assert torch.equal(model[0].weight, written) and not model[0].weight.requires_grad
    assert report["0.weight"].reason == "dequantized: written since its master was kept"
    assert torch.equal(model[1].weight, original)  # the other one is untouched


@pytest.mark.parametrize("write", ["load", "data", "parameter"])
def test_every_way_to_replace_values_is_seen(write: str) -> None:
    layer = nn.Linear(16, 16)
    stowage.stow(layer, "int8", keep_master="ram")
    new = torch.randn(16, 16)
    if write == "load":
        stowage.load_state_dict(layer, {"weight": new, "bias": layer.bias.detach()})
    elif write == "data":
        layer.weight.data = new
    else:
        layer.weight = nn.Parameter(stowage.quantize(new, "int8"), requires_grad=False)
    stowage.unstow(layer)
    assert torch.equal(layer.weight, stowage.quantize(new, "int8").dequantize())


def test_a_plain_tensor_written_after_it_was_converted_stays_as_written() -> None:
    model = Tied()
    stowage.stow(model, "int8", compute_dtype=torch.bfloat16, keep_master="ram")
    model.norm.weight.data.fill_(2.0)
    stowage.unstow(model)
    assert model.norm.weight.dtype == torch.bfloat16 and bool((model.norm.weight == 2).all())
    assert model.norm.bias.dtype == torch.float32


@pytest.mark.parametrize("place", PLACES)
def test_another_storage_is_made_from_the_master(place: str) -> None:
    model = Tied()
    wanted, before = copy.deepcopy(model), bits(model)
    stowage.stow(model, "nf4", keep_master=place)
    report = stowage.stow(model, "int8")
    assert report["body.weight"].reason == "made from its master"
    assert report["body.weight"].master == place
    stowage.stow(wanted, "int8")
    assert bits_at_rest(model) == bits_at_rest(wanted)
    assert report["body.weight"].max_error == stowage.report(wanted)["body.weight"].max_error
    stowage.unstow(model)
    assert bits(model) == before


def test_another_storage_of_a_written_weight_is_made_from_what_was_written() -> None:
    layer = nn.Linear(32, 16)
    stowage.stow(layer, "int8", rules={"weight": "int8"}, keep_master="ram")
    fill(layer.weight)
    written = layer.weight.dequantize()
    report = stowage.stow(layer, rules={"weight": "nf4"})
    assert report["weight"].storage == "int8:row" and "restow=True" in report["weight"].reason
    report = stowage.stow(layer, rules={"weight": "nf4"}, restow=True)
    assert report["weight"].reason == "rule 'weight'; made from its dequantized values"
    assert report["weight"].master is None
    assert torch.equal(layer.weight.dequantize(), stowage.quantize(written, "nf4").dequantize())


def test_unstow_to_a_dtype_rounds_the_original_once() -> None:
    layer = nn.Linear(16, 16)
    original = layer.weight.detach().clone()
    stowage.stow(layer, "f8_e4m3", keep_master="ram")
    stowage.unstow(layer, torch.bfloat16)
    assert torch.equal(layer.weight, original.bfloat16()) and layer.bias.dtype == torch.float32


def test_unstow_to_a_dtype_leaves_no_master() -> None:
    model = Tied()
    stowage.stow(model, "int8", compute_dtype=torch.bfloat16, keep_master="ram")
    stowage.unstow(model, torch.bfloat16)
    assert stowage.drop_master(model) == 0 and model.norm.weight.dtype == torch.bfloat16

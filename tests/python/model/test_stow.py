# SPDX-License-Identifier: Apache-2.0
"""stow and unstow: in place, whole or not at all, ties and dtypes as stated."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import stowage
from stowage._ops import library
from stowage._ops.library import composite_forced
from stowage.tensor import StowedTensor

STORAGES = [
    "f32", "bf16", "f16", "f8_e4m3", "f8_e4m3:tensor", "f8_e5m2:row", "f8_e4m3:block32",
    "int8", "int8:tensor", "int8:block64", "nf4", "nf4:block128", "nf4:block64:nested", "fp4",
]  # fmt: skip


class Tied(nn.Module):
    """A language model in small: an embedding tied to its head, a norm, buffers of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 32)
        self.body = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)
        self.lm_head = nn.Linear(32, 48, bias=False)
        self.lm_head.weight = self.embed.weight
        self.register_buffer("scale", torch.rand(32))
        self.register_buffer("ids", torch.arange(4), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.body(self.embed(ids)) * self.scale)
        return self.lm_head(hidden)


IDS = torch.tensor([[1, 5, 47], [0, 3, 3]])


def dense_twin(model: nn.Module) -> nn.Module:
    """The reference: the same model with the dequantized weights."""
    twin = copy.deepcopy(model)
    stowage.unstow(twin)
    return twin


@pytest.mark.parametrize("storage", STORAGES)
def test_a_stowed_model_computes_like_its_dequantized_twin(storage: str) -> None:
    model = Tied()
    report = stowage.stow(model, storage)
    assert [row.name for row in report.stowed] == ["embed.weight", "body.weight"]
    weight = model.body.weight
    assert isinstance(weight, StowedTensor) and isinstance(weight, nn.Parameter)
    assert not weight.requires_grad and weight.dtype == torch.float32
    assert torch.allclose(model(IDS), dense_twin(model)(IDS), atol=1e-5)


def test_exact_is_bit_equal() -> None:
    model = Tied()
    stowage.stow(model, "nf4", exact=True)
    assert torch.equal(model(IDS), dense_twin(model)(IDS))


def test_ties_stay_ties() -> None:
    model = Tied()
    stowage.stow(model, "int8")
    assert model.lm_head.weight is model.embed.weight
    assert stowage.report(model)["lm_head.weight"].name == "embed.weight"
    stowage.unstow(model)
    assert model.lm_head.weight is model.embed.weight
    assert type(model.embed.weight) is nn.Parameter


def test_compute_dtype_reaches_everything_floating() -> None:
    model = Tied()
    norm, optimizer = model.norm.weight, torch.optim.SGD(model.parameters(), lr=0.1)
    model(IDS).sum().backward()
    stowage.stow(model, "f8_e4m3", compute_dtype=torch.bfloat16)
    floating = [*model.parameters(), model.scale]
    assert {t.dtype for t in floating} == {torch.bfloat16}
    assert model.ids.dtype == torch.int64
    # The plain Parameters are the same objects, so that optimizers still hold them.
    assert model.norm.weight is norm and norm in set(optimizer.param_groups[0]["params"])
    assert norm.grad is not None and norm.grad.dtype == torch.bfloat16
    assert model(IDS).dtype == torch.bfloat16


def test_without_compute_dtype_each_weight_keeps_its_own() -> None:
    model = Tied()
    model.body.half()
    stowage.stow(model, "f8_e4m3")
    assert (model.body.weight.dtype, model.embed.weight.dtype) == (torch.float16, torch.float32)


def test_kept_in_fp32_modules_keep_their_dtype() -> None:
    model = Tied()
    model._keep_in_fp32_modules = ["norm"]
    stowage.stow(model, "f8_e4m3", compute_dtype=torch.bfloat16)
    assert model.norm.weight.dtype == torch.float32
    assert model.body.weight.dtype == torch.bfloat16


def test_values_are_quantized_from_the_given_dtype() -> None:
    """The codes come from fp32, not from values that were rounded to the compute dtype first."""
    weight = torch.randn(16, 64)
    model = nn.Linear(64, 16, bias=False)
    model.weight.data.copy_(weight)
    stowage.stow(model, "int8", compute_dtype=torch.bfloat16)
    codes, scale = library.quantize(weight, model.weight._storage.key)
    assert torch.equal(model.weight.parts["codes"], codes)
    assert torch.equal(model.weight.parts["scale"], scale)


def test_unstow_gives_plain_parameters() -> None:
    model = Tied()
    stowage.stow(model, "nf4", compute_dtype=torch.bfloat16)
    values = model.body.weight.dequantize(torch.float32)
    report = stowage.unstow(model, torch.float32)
    assert not report.stowed
    assert type(model.body.weight) is nn.Parameter
    assert torch.equal(model.body.weight, values)
    assert model.norm.weight.dtype == torch.bfloat16  # only resting weights change


@pytest.mark.parametrize("make", [lambda: nn.Linear(32, 8), lambda: nn.Conv1d(4, 8, 3)])
def test_the_root_may_be_the_layer(make: Any) -> None:
    layer = make()
    assert [row.name for row in stowage.stow(layer, "int8").stowed] == ["weight"]
    assert layer.weight.resting == "int8:row"


def test_containers_of_parameters() -> None:
    model = nn.Module()
    model.experts = nn.ParameterList([torch.randn(8, 32) for _ in range(2)])
    model.named = nn.ParameterDict({"a": torch.randn(4, 8, 32)})
    stowage.stow(model, rules={"experts.*": "nf4", "named.a": "int8:row2"})
    assert [w.resting for w in model.experts] == ["nf4:block64"] * 2
    assert model.named["a"].parts["scale"].shape == (4, 8, 1)
    stowage.unstow(model)
    assert all(type(w) is nn.Parameter for w in [*model.experts, *model.named.values()])


def test_only_a_part_of_a_model() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 32)))
    stowage.stow(model[1], "int8")
    assert type(model[0].weight) is nn.Parameter and isinstance(model[1][0].weight, StowedTensor)


def test_recurrent_layers_by_rule() -> None:
    """Their modules keep a second list of the same parameters."""
    model = nn.GRU(32, 16, batch_first=True)
    x = torch.randn(2, 5, 32)
    stowage.stow(model, rules={"weight_ih_l0": "int8"})
    assert torch.allclose(model(x)[0], dense_twin(model)(x)[0], atol=1e-5)


def test_modules_with_fast_paths_of_their_own() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    x = torch.randn(2, 5, 32)
    stowage.stow(layer, rules={"*weight": "f8_e4m3:row", "norm*": None})
    with torch.inference_mode():
        assert torch.allclose(layer(x), dense_twin(layer)(x), atol=1e-4)


def test_a_weight_that_rests_keeps_its_storage_unless_asked() -> None:
    model = Tied()
    stowage.stow(model, "nf4")
    codes = model.body.weight.parts["codes"].clone()
    report = stowage.stow(model, "int8")
    assert "restow=True" in report["body.weight"].reason
    assert model.body.weight.resting == "nf4:block64"
    again = stowage.stow(model, "nf4", compute_dtype=torch.bfloat16, exact=True)
    assert again["body.weight"].reason == "rested already"
    assert again["body.weight"].relative_error is not None  # still that of the first stowing
    assert torch.equal(model.body.weight.parts["codes"], codes)
    assert model.body.weight.dtype == torch.bfloat16 and model.body.weight._exact

    values = model.body.weight.dequantize(torch.float32)
    stowage.stow(model, "int8", restow=True)
    assert model.body.weight.resting == "int8:row"
    codes = library.quantize(values, model.body.weight._storage.key)[0]
    assert torch.equal(model.body.weight.parts["codes"], codes)
    assert model.lm_head.weight is model.embed.weight


def test_none_and_an_empty_model_are_legal() -> None:
    assert stowage.stow(nn.ReLU(), "int8").rows == ()
    model = Tied()
    assert not stowage.stow(model, None, compute_dtype=torch.bfloat16).stowed
    assert model.norm.weight.dtype == torch.bfloat16


def test_stowing_inside_inference_mode_makes_ordinary_tensors() -> None:
    model = Tied()
    with torch.inference_mode():
        stowage.stow(model, "int8")
        first = model(IDS)
    assert not model.body.weight.parts["codes"].is_inference()
    assert torch.equal(model(IDS).detach(), first)


def test_non_contiguous_weights() -> None:
    model = nn.Linear(32, 64, bias=False)
    model.weight = nn.Parameter(torch.randn(32, 64).t())
    values = model.weight.detach().clone()
    stowage.stow(model, "f32")
    assert torch.equal(model.weight.dequantize(), values)
    conv = nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last)
    values = conv.weight.detach().clone()
    stowage.stow(conv, "f32")
    assert torch.equal(conv.weight.dequantize(), values)


PEAK = """
import threading, torch, stowage, sys
from torch import nn

def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8)))  # 128 MiB
stowage.stow(nn.Linear(64, 64), sys.argv[1])  # what a first call allocates for good
peak, stop = [0], threading.Event()
def sample():
    while not stop.is_set():
        peak[0] = max(peak[0], anonymous())
        stop.wait(0.001)
thread = threading.Thread(target=sample)
before = anonymous()
thread.start()
report = stowage.stow(model, sys.argv[1])
stop.set(); thread.join()
print(peak[0] - before, report.stowed_bytes, anonymous() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(composite_forced(), reason="stock torch ops have temporaries of their own")
@pytest.mark.parametrize("storage", ["nf4:block64:nested", "int8"])
def test_stowing_takes_its_result_and_little_more(storage: str) -> None:
    command = [sys.executable, "-c", PEAK, storage]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, rest, after = map(int, done.stdout.split())
    assert peak <= rest + (16 << 20)
    assert after <= rest - (128 << 20) + (16 << 20)  # the values are gone

# SPDX-License-Identifier: Apache-2.0
"""Maps of modules to several devices, and language models on them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from pretend_device import counted, counters
from torch import nn

import stowage

ZERO, ONE = torch.device("pretend:0"), torch.device("pretend:1")
IDS = torch.tensor([[1, 5, 9, 2]])


class Block(nn.Module):
    """Adds what a part of it gives to what it was given, as layers of language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(192), nn.Linear(192, 256), nn.Linear(256, 192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def made(storage: str | None) -> Net:
    torch.manual_seed(0)
    model = Net().eval().requires_grad_(False)
    if storage:
        stowage.stow(model, storage)
    return model


X = torch.linspace(-1, 1, 3 * 192).reshape(3, 192)
MAPS: list[dict[str, Any]] = [
    {"layers.0": "pretend:0", "layers.1": "pretend:1", "layers.3": 1},
    {"layers.1": "ram", "layers.2": "pretend:2"},
    {"layers.1.up": "cpu", "layers.2.down": "pretend:1"},
    {"layers.2": ONE, "norm": ONE},
    {"": "pretend:0"},
    {"layers": "pretend:1"},
]


@pytest.mark.parametrize("places", MAPS)
@pytest.mark.parametrize("storage", [None, "int8"])
def test_activations_move(storage: str | None, places: dict[str, Any]) -> None:
    model = made(storage)
    with torch.no_grad():
        wanted = copy.deepcopy(model).to(ZERO)(X.to(ZERO)).cpu()
        on_cpu = model(X)
    with counted(), torch.no_grad():
        before = [counters(i).held for i in range(3)]
        stowage.offload(model, device=ZERO, accelerator="4MiB", device_map=places)
        for name, place in places.items():
            here = {p.device.type for p in model.get_submodule(name).parameters()}
            assert here == ({"cpu"} if place in ("ram", "cpu") else {"pretend"})
        for _ in range(2):
            got = model(X)
            close = torch.allclose(got, wanted, atol=1e-5)
            assert got.device.type == "cpu" and close and torch.allclose(got, on_cpu, atol=1e-5)
            if not any(place in ("ram", "cpu") for place in places.values()):
                assert torch.equal(got, wanted)
            assert model(X.to(ZERO)).device.type == "pretend"
        stowage.onload(model)
        assert {p.device.type for p in model.parameters()} == {"cpu"}
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
        assert torch.equal(model(X), on_cpu)
        del got
        assert [counters(i).held for i in range(3)] == before


def test_resident_modules_cross_no_link() -> None:
    model = made("int8")
    with counted(), torch.no_grad():
        stowage.offload(model, device=ZERO, accelerator="4MiB", device_map={"layers": 1, "norm": 1})
        x = X.to(ZERO)
        model(x)
        before = [counters(i).copied_in for i in range(3)]
        model(x)
        assert [counters(i).copied_in for i in range(3)] == before


def test_ties_across_devices_are_refused() -> None:
    model = made("int8")
    model.layers[3].up.weight = model.layers[0].up.weight
    with pytest.raises(stowage.InvalidArgument, match="it has two places for it"):
        stowage.offload(model, device=ZERO, accelerator="4MiB", device_map={"layers.3": 1})


@pytest.fixture(scope="module")
def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


LLAMA_MAPS: list[dict[str, Any] | None] = [
    None,
    {"model.layers.0": 0, "model.layers.1": 1, "model.layers.2": 1},
    {"model.layers.1": "ram"},
]


@pytest.mark.parametrize("places", LLAMA_MAPS)
@pytest.mark.parametrize("storage", [None, "int8"])
def test_generate(llama: Any, storage: str | None, places: dict[str, Any] | None) -> None:
    model = copy.deepcopy(llama)
    if storage:
        stowage.stow(model, storage)
    with torch.no_grad():
        wanted = copy.deepcopy(model).to(ZERO)(IDS.to(ZERO)).logits.cpu()
        tokens = model.generate(IDS, max_new_tokens=6, do_sample=False)
    with counted(), torch.no_grad():
        stowage.offload(model, device=ZERO, accelerator="1MiB", device_map=places)
        logits = model(IDS).logits
        assert logits.device.type == "cpu" and torch.allclose(logits, wanted, atol=1e-4)
        if places is None:
            assert torch.equal(logits, wanted) and model.device.type == "cpu"
        given = model.generate(IDS, max_new_tokens=6, do_sample=False)
        assert torch.equal(given.cpu(), tokens)
        given = model.generate(IDS.to(ZERO), max_new_tokens=6, do_sample=False)
        assert torch.equal(given.cpu(), tokens)
        stowage.onload(model)
        assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("storage", [None, "int8"])
@pytest.mark.parametrize("name", ["balanced", "balanced_low_0", "sequential"])
def test_maps_by_name(name: str, storage: str | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(12))).eval().requires_grad_(False)
    if storage:
        stowage.stow(model, storage)
    wanted = copy.deepcopy(model)
    size = (260 if storage else 1026) << 10  # of a layer
    ring = 2 * (size + (256 << 10))
    room = {"pretend:0": 6 * size + ring, "pretend:1": 3 * size}
    x = torch.linspace(-1, 1, 3 * 512).reshape(3, 512)
    with counted(), torch.no_grad():
        before = [counters(i).held for i in range(3)]
        stowage.offload(
            model, accelerator=room, ram="4MiB", folder=tmp_path / "w",
            device_map=name,
        )  # fmt: skip
        expected = wanted.to(ZERO)(x.to(ZERO)).cpu()
        for _ in range(2):
            assert torch.allclose(model(x), expected, atol=1e-5)
        placed = [str(m.weight.device) for m in model]
        assert {"pretend:0", "pretend:1", "cpu"} == set(placed)
        held = [counters(i).held - before[i] for i in range(3)]
        assert held[2] == 0 and held[1] <= room["pretend:1"]
        stowage.onload(model)
        wanted.to("cpu")
        assert torch.equal(model(x), wanted(x))


def test_the_cpu_is_no_device_to_fill() -> None:
    given = {"device": "cpu", "accelerator": {"pretend:0": "1MiB"}, "device_map": "balanced"}
    with pytest.raises(stowage.InvalidArgument, match="accelerator must come with a device"):
        stowage.offload(made("int8"), **given)


def test_auto_plans_for_the_device(tmp_path: Path) -> None:
    model = made("int8")
    with counted(), torch.no_grad():
        wanted = copy.deepcopy(model).to(ZERO)(X.to(ZERO)).cpu()
        stowage.offload(
            model, device=ZERO, accelerator="8MiB", ram="64MiB", folder=tmp_path / "w",
            device_map="auto",
        )  # fmt: skip
        assert torch.allclose(model(X), wanted, atol=1e-5)

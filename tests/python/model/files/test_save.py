# SPDX-License-Identifier: Apache-2.0
"""save and load give back what was there, in files that other tools read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn

import stowage
from stowage._ops import library
from stowage.tensor import StowedTensor

STORAGES = [
    "f32", "bf16", "f16", "f8_e4m3", "f8_e5m2", "f8_e4m3:tensor", "f8_e4m3:row", "f8_e5m2:block32",
    "int8", "int8:block64", "nf4", "nf4:block64:nested", "fp4", "fp4:block32:nested",
]  # fmt: skip
IDS = torch.tensor([[1, 5, 47], [0, 3, 3]])


class Model(nn.Module):
    """Ties, persistent and computed buffers, a conv, odd sizes, an integer and an empty tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 36)
        self.body = nn.Linear(36, 36)
        self.conv = nn.Conv1d(36, 36, 3, padding=1)
        self.norm = nn.LayerNorm(36)
        self.lm_head = nn.Linear(36, 48, bias=False)
        self.lm_head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("scale", torch.rand(36))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer(
            "frequencies", 1.0 / 10 ** torch.arange(0, 1, 1 / 36), persistent=False
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.body(self.embed(ids)) * self.scale * self.frequencies
        hidden = self.conv(hidden.transpose(1, 2)).transpose(1, 2)
        return self.lm_head(self.norm(hidden))


def same_parts(one: StowedTensor, other: StowedTensor) -> bool:
    pairs = zip(one.parts.values(), other.parts.values(), strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def same_model(one: nn.Module, other: nn.Module) -> None:
    """Same names, storages, dtypes, bytes and ties."""
    state, wanted = other.state_dict(), one.state_dict()
    assert list(state) == list(wanted)
    for name, tensor in wanted.items():
        assert type(state[name]) is type(tensor) and state[name].dtype == tensor.dtype
        if isinstance(tensor, StowedTensor):
            assert state[name].resting == tensor.resting
            assert same_parts(state[name], tensor)
        else:
            assert torch.equal(state[name], tensor)
    pairs = zip(one.named_buffers(), other.named_buffers(), strict=True)
    assert all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in pairs)
    assert [n for n, _ in one.named_parameters()] == [n for n, _ in other.named_parameters()]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("compute", [None, torch.bfloat16])
def test_save_and_load_give_the_same_model(
    tmp_path: Path, storage: str, compute: torch.dtype | None
) -> None:
    model = Model()
    stowage.stow(model, storage, compute_dtype=compute)
    path = stowage.save(model, tmp_path)
    assert path == tmp_path / "model.safetensors" and list(tmp_path.iterdir()) == [path]
    built = stowage.load(Model, tmp_path)
    filled = stowage.load(Model(), tmp_path, verify=True)
    for loaded in (built, filled):
        same_model(model, loaded)
        assert loaded.lm_head.weight is loaded.embed.weight
        assert not loaded.body.weight.requires_grad and loaded.norm.weight.requires_grad
        assert torch.equal(loaded(IDS), model(IDS))


@pytest.mark.parametrize("storage", STORAGES)
def test_a_float_file_is_quantized_on_the_way(tmp_path: Path, storage: str) -> None:
    """The same bytes as stow gives, from the values of the file and not of the compute dtype."""
    model = Model()
    stowage.save(model, tmp_path)
    loaded = stowage.load(Model, tmp_path, storage, compute_dtype=torch.bfloat16)
    stowage.stow(model, storage, compute_dtype=torch.bfloat16)
    same_model(model, loaded)
    row = stowage.report(loaded)["body.weight"]
    assert row.max_error == stowage.report(model)["body.weight"].max_error
    assert stowage.report(loaded)["norm.weight"].reason


def test_rules_when_loading(tmp_path: Path) -> None:
    model = Model()
    stowage.save(model, tmp_path)
    rules: Any = {"conv": "f8_e4m3:row", nn.Embedding: None}
    loaded = stowage.load(Model, tmp_path, "nf4", rules=rules, exact=True)
    stowage.stow(model, "nf4", rules=rules, exact=True)
    same_model(model, loaded)
    assert loaded.body.weight._exact


def test_a_plain_model(tmp_path: Path) -> None:
    model = Model().bfloat16()
    stowage.save(model, tmp_path)
    loaded = stowage.load(Model, tmp_path)
    same_model(model, loaded)  # dtypes are the file's, those of computed buffers too
    half = stowage.load(Model, tmp_path, compute_dtype=torch.float16)
    assert {p.dtype for p in half.parameters()} == {torch.float16}
    assert half.frequencies.dtype == half.scale.dtype == torch.float16
    assert half.steps.dtype == torch.int64


def test_safetensors_reads_the_names_of_the_formats_page(tmp_path: Path) -> None:
    model = Model()
    rules: Any = {"embed": "nf4:block64:nested", "body": "f8_e4m3:row", "conv": "int8", "*": None}
    stowage.stow(model, rules=rules, compute_dtype=torch.bfloat16)
    stowage.save(model, tmp_path, metadata={"author": "me"})
    read = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert {name: t.dtype for name, t in read.items() if "weight" in name} == {
        "embed.weight": torch.uint8,
        "embed.weight.absmax": torch.uint8,
        "embed.weight.nested_absmax": torch.float32,
        "embed.weight.nested_quant_map": torch.float32,
        "embed.weight.quant_map": torch.float32,
        "embed.weight.quant_state.bitsandbytes__nf4": torch.uint8,
        "body.weight": torch.float8_e4m3fn,
        "body.weight_scale": torch.float32,
        "conv.weight": torch.int8,
        "conv.weight_scale": torch.float32,
        "norm.weight": torch.bfloat16,
    }
    wide = read["body.weight"].float() * read["body.weight_scale"]
    assert torch.equal(wide, model.body.weight.dequantize(torch.float32))
    state = json.loads(bytes(read["embed.weight.quant_state.bitsandbytes__nf4"].tolist()))
    assert state["shape"] == [48, 36] and state["dtype"] == "bfloat16"
    assert state["nested_offset"] == model.embed.weight.parts["nested_offset"].item()
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "pt" and metadata["author"] == "me"
    assert metadata["lm_head.weight"] == "embed.weight"  # as safetensors.torch.save_model has it


def test_files_of_others_are_read_without_a_manifest(tmp_path: Path) -> None:
    weight = torch.randn(16, 64)
    for storage in ("f8_e4m3", "f8_e5m2:tensor", "int8", "f8_e4m3:block16", "nf4:block32:nested"):
        layer = nn.Linear(64, 16, bias=False)
        layer.weight.data.copy_(weight)
        stowage.stow(layer, storage, compute_dtype=torch.bfloat16)
        flat = {name: t.clone() for name, t in stowage.state_dict(layer).items()}
        safetensors.torch.save_file(flat, tmp_path / "model.safetensors")
        loaded = stowage.load(lambda: nn.Linear(64, 16, bias=False), tmp_path)
        assert same_parts(loaded.weight, layer.weight)
        # Only a quant state says what a weight computes in; else it is the model's own dtype.
        assert loaded.weight.dtype == (torch.bfloat16 if "nf4" in storage else torch.float32)


def test_weights_without_a_compute_dtype_take_that_of_the_rest(tmp_path: Path) -> None:
    codes = torch.randn(8, 8).to(torch.float8_e4m3fn)
    state = {"weight": codes, "bias": torch.zeros(8, dtype=torch.float16)}
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    loaded = stowage.load(lambda: nn.Linear(8, 8), tmp_path)
    assert loaded.weight.dtype == loaded.bias.dtype == torch.float16


def test_ties_that_only_the_file_knows(tmp_path: Path) -> None:
    """Peer defect 42: a tied tensor is written once and is one object again."""

    class Untied(Model):
        def __init__(self) -> None:
            super().__init__()
            self.lm_head.weight = nn.Parameter(torch.empty(48, 36))

    model = Model()
    stowage.stow(model, "int8")
    stowage.save(model, tmp_path)
    loaded = stowage.load(Untied, tmp_path)
    assert loaded.lm_head.weight is loaded.embed.weight


def test_tied_weights_that_a_file_has_twice(tmp_path: Path) -> None:
    model = Model()
    state = {name: t.clone() for name, t in model.state_dict().items()}
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    assert stowage.load(Model, tmp_path).lm_head.weight.shape == (48, 36)
    state["lm_head.weight"][0, 0] += 1
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"embed\.weight: is one tensor with lm_head\.weight"):
        stowage.load(Model, tmp_path)


def test_shards_and_their_replacement(tmp_path: Path) -> None:
    model = Model()
    stowage.stow(model, "nf4")
    index = stowage.save(model, tmp_path, shard_bytes=4096)
    assert index.name == "model.safetensors.index.json"
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    same_model(model, stowage.load(Model, tmp_path))
    same_model(model, stowage.load(Model, index))
    assert stowage.save(model, tmp_path) == tmp_path / "model.safetensors"
    same_model(model, stowage.load(Model, tmp_path))


def test_saving_over_the_file_that_the_weights_are_mapped_from(tmp_path: Path) -> None:
    model = Model()
    stowage.stow(model, "int8")
    stowage.save(model, tmp_path)
    mapped = stowage.load(Model, tmp_path, mmap=True)
    stowage.save(mapped, tmp_path)
    same_model(model, stowage.load(Model, tmp_path))
    same_model(model, mapped)


@pytest.mark.parametrize("storage", ["bf16", "f8_e4m3", "int8", "nf4:block64:nested"])
def test_mapped_weights(tmp_path: Path, storage: str) -> None:
    """Used in the file; the first write copies; nothing is written to the file."""
    model = Model()
    stowage.stow(model, storage)
    path = stowage.save(model, tmp_path)
    before = path.read_bytes()
    mapped = stowage.load(Model, tmp_path, mmap=True)
    assert stowage.report(mapped)["body.weight"].tier == "disk"
    assert stowage.report(mapped)["norm.weight"].tier == "ram"
    assert torch.equal(mapped(IDS), model(IDS))
    with torch.no_grad():
        mapped.body.weight[0] = 0.0
        mapped.conv.weight.zero_()
        mapped.norm.weight.zero_()
    assert mapped.body.weight.dequantize()[0].eq(0).all()
    assert stowage.report(mapped)["body.weight"].tier == "ram"
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "build", [Model, lambda: Model().eval(), lambda: torch.nn.Module.to(Model(), torch.float32)]
)
def test_factories_build_without_memory_for_weights(
    tmp_path: Path, build: Callable[[], nn.Module]
) -> None:
    stowage.save(Model(), tmp_path)
    seen: list[nn.Module] = []

    def factory() -> nn.Module:
        seen.append(build())
        assert all(p.is_meta for p in (seen[0].body.weight, seen[0].conv.weight))
        assert not seen[0].frequencies.is_meta
        return seen[0]

    assert stowage.load(factory, tmp_path) is seen[0]
    assert not any(t.is_meta for t in [*seen[0].parameters(), *seen[0].buffers()])


def test_factories_on_the_meta_device_get_their_buffers(tmp_path: Path) -> None:
    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return Model()

    model = Model()
    stowage.save(model, tmp_path)
    same_model(model, stowage.load(on_meta, tmp_path))
    # A model that is built already has lost what no file holds.
    with pytest.raises(ValueError, match=r"frequencies: must get a value.*pass a function"):
        stowage.load(on_meta(), tmp_path)


def test_state_dicts_of_both_forms() -> None:
    """Peer defects 66, 67: what a model gives, it takes back."""
    model = Model()
    stowage.stow(
        model, rules={"embed": "nf4:block64:nested", "body": "f8_e4m3:block16", "conv": "int8"}
    )
    flat = stowage.state_dict(model)
    assert all(type(t) is torch.Tensor for t in flat.values())
    assert "lm_head.weight" not in flat and flat["body.weight"].dtype == torch.float8_e4m3fn
    for state in (flat, model.state_dict()):
        other = Model()
        stowage.load_state_dict(other, state)
        same_model(model, other)
        parts = other.conv.weight.parts["codes"]
        assert parts.data_ptr() != model.conv.weight.parts["codes"].data_ptr()


def test_a_plain_state_is_quantized_to_what_the_model_has() -> None:
    model, values = Model(), Model()
    stowage.stow(model, "int8", compute_dtype=torch.bfloat16, exact=True)
    stowage.load_state_dict(model, values.state_dict())
    assert model.body.weight.resting == "int8:row" and model.body.weight._exact
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}  # the model's, as in torch
    codes = library.quantize(values.body.weight.detach(), model.body.weight._storage.key)[0]
    assert torch.equal(model.body.weight.parts["codes"], codes)

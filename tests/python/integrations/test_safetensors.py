# SPDX-License-Identifier: Apache-2.0
"""Models with resting weights through safetensors' own writers, and those that call them: files of
ordinary values under ordinary names, which everybody opens."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import PyTorchModelHubMixin
from safetensors import torch as files
from torch import Tensor, nn

import stowage
from stowage.integrations import safetensors as integration
from stowage.training import convert_float8

STORAGES = ["f8_e4m3:row", "int8:tensor", "int8:block32", "nf4:nested", "fp4", "bf16"]


class Net(nn.Module, PyTorchModelHubMixin):
    def __init__(self, width: int = 64, tied: bool = True) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(16, width), nn.Linear(width, width)
        self.head = nn.Linear(width, 16)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(torch.tanh(self.body(self.table(ids))))
        if labels is None:
            return logits
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


IDS = torch.arange(16)


def net(
    storage: str | None, seed: int = 0, dtype: torch.dtype = torch.float32, tied: bool = True
) -> Net:
    torch.manual_seed(seed)
    model = Net(tied=tied).to(dtype)
    if storage is not None:
        stowage.stow(model, storage)
    return model


def dense(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: p.dequantize() if isinstance(p, stowage.StowedTensor) else p.detach().clone()
        for name, p in model.state_dict().items()
    }


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert type(found[name]) is Tensor and found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("storage", STORAGES)
def test_save_file_writes_values(storage: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = net(storage, dtype=dtype)
    state = model.state_dict()
    with pytest.raises(RuntimeError, match=r"share memory.*(head|table)\.weight"):
        files.save_file(state, tmp_path / "tied")  # as for plain ones
    del state["head.weight"]
    files.save_file(state, tmp_path / "file")
    wanted = dense(model)
    del wanted["head.weight"]
    same(files.load_file(tmp_path / "file"), wanted)
    same(files.load(files.save(state)), wanted)


@pytest.mark.parametrize("into", [None, "f8_e4m3:row"])
@pytest.mark.parametrize("storage", STORAGES)
def test_save_model_and_load_model(storage: str, into: str | None, tmp_path: Path) -> None:
    model, other = net(storage), net(into, seed=1)
    files.save_model(model, str(tmp_path / "file"))
    assert len(files.load_file(tmp_path / "file")) == 4  # what is tied, once
    assert files.load_model(other, tmp_path / "file") == (set(), [])
    assert other.head.weight is other.table.weight
    wanted = dense(model)
    if into is not None:
        for name in ("table.weight", "body.weight", "head.weight"):
            wanted[name] = stowage.quantize(wanted[name], into).dequantize()
    same(dense(other), wanted)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise"])
def test_weights_of_fp8_training(recipe: str, tmp_path: Path) -> None:
    """Plain values under their names, ties as those of plain weights."""

    def trained(seed: int) -> Net:
        model = net(None, seed, tied=False)
        model.add_module("again", nn.Linear(64, 64))
        model.again.weight = model.body.weight
        return convert_float8(model, recipe)

    model, other = trained(0), trained(1)
    state = model.state_dict()
    with pytest.raises(RuntimeError, match=r"share memory.*(again|body)\.weight"):
        files.save_file(state, tmp_path / "tied")
    del state["again.weight"]
    wanted = {name: getattr(value, "plain_value", value) for name, value in state.items()}
    files.save_file(state, tmp_path / "file")
    same(files.load_file(tmp_path / "file"), wanted)
    files.save_model(model, str(tmp_path / "model"))
    files.load_model(other, tmp_path / "model")
    assert other.again.weight is other.body.weight
    assert torch.equal(other(IDS), model(IDS))
    model.save_pretrained(tmp_path / "hub")
    found = files.load_file(tmp_path / "hub" / "model.safetensors")
    same(found, {name: wanted[name.replace("again.weight", "body.weight")] for name in found})


def test_weights_that_lie_in_a_mapped_file(tmp_path: Path) -> None:
    model = net("f8_e4m3:row")
    stowage.save(model, tmp_path)
    mapped = stowage.load(Net, tmp_path, mmap=True)
    files.save_model(mapped, str(tmp_path / "values"))
    wanted = dense(model)
    found = files.load_file(tmp_path / "values")
    same(found, {name: wanted[name] for name in found})
    assert len(found) == 4


def test_the_values_are_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    original = stowage.StowedTensor.dequantize

    def dequantize(self: Any, dtype: Any = None) -> Tensor:
        made.append(weakref.ref(values := original(self, dtype)))
        return values

    monkeypatch.setattr(stowage.StowedTensor, "dequantize", dequantize)
    model = net("int8:tensor")
    files.save_model(model, str(tmp_path / "file"))
    assert len(made) == 2 and all(ref() is None for ref in made)


def test_another_safetensors_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that reads tensors in another way must not write codes, or nothing."""
    plain = {"x": torch.ones(2)}
    with monkeypatch.context() as patch:
        patch.delattr(files, "_to_ndarray")
        with pytest.raises(NotImplementedError, match=r"misses _to_ndarray.*stowage\.save"):
            integration.register()
    files.save_file(plain, tmp_path / "plain")
    same(files.load_file(tmp_path / "plain"), plain)


def test_the_hub_mixin(tmp_path: Path) -> None:
    model = net("int8:tensor")
    model.save_pretrained(tmp_path)
    opened = Net.from_pretrained(tmp_path)
    assert opened.head.weight is opened.table.weight
    same(dense(opened), dense(model))
    stowage.stow(opened, "int8:tensor")
    assert torch.equal(opened(IDS), model(IDS))


def test_accelerate_saves_and_loads(tmp_path: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = net("int8:tensor")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    prepared, its = accelerator.prepare(model, optimizer)
    accelerator.backward(prepared(IDS, IDS)["loss"])
    its.step()
    accelerator.save_state(str(tmp_path / "state"))
    accelerator.save_model(prepared, str(tmp_path / "model"))
    wanted, codes = dense(model), model.body.weight.parts["codes"].clone()
    found = files.load_file(tmp_path / "model" / "model.safetensors")
    same(found, {name: wanted[name] for name in found})
    accelerator.backward(prepared(IDS, IDS)["loss"])
    its.step()
    assert not torch.equal(model.body.bias, wanted["body.bias"])
    accelerator.load_state(str(tmp_path / "state"))
    same(dense(model), wanted)
    assert torch.equal(model.body.weight.parts["codes"], codes)


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 16

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        return {"ids": torch.tensor(at), "labels": torch.tensor((at * 5) % 16)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trainer_with_a_frozen_base_saves_and_resumes(dtype: torch.dtype, tmp_path: Path) -> None:
    """The resumed run is the one that was not stopped, bit for bit. A model that ties its weights
    must say so to transformers (`_tied_weights_keys`), resting or not."""
    from transformers import Trainer, TrainingArguments

    def run(folder: str, steps: int, seed: int = 0, resume: Any = None) -> Net:
        model = net("int8:tensor", seed, dtype, tied=False)
        facts: Any = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "seed": 3}
        options = TrainingArguments(
            str(tmp_path / folder), max_steps=steps, save_steps=2, learning_rate=0.01,
            lr_scheduler_type="constant", remove_unused_columns=False, **facts,
        )  # fmt: skip
        trainer = Trainer(model, options, train_dataset=Rows())
        trainer.train(resume_from_checkpoint=resume)
        return model

    wanted = run("whole", 4)
    assert (tmp_path / "whole" / "checkpoint-2" / "model.safetensors").exists()
    got = run("resumed", 4, resume=str(tmp_path / "whole" / "checkpoint-2"))
    same(dense(got), dense(wanted))
    assert torch.equal(got.body.weight.parts["codes"], wanted.body.weight.parts["codes"])
    assert not torch.equal(got.body.bias, net(None, 0, dtype).body.bias)

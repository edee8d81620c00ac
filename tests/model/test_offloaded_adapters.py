# SPDX-License-Identifier: Apache-2.0
"""PEFT's adapters on a base whose weights rest on a disk."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from offloadable import KINDS, ONE_WEIGHT, X, made
from torch import nn

import stowage
from stowage.integrations import peft as stowed_peft
from stowage.tensor import StowedTensor

peft = pytest.importorskip("peft")
CONFIG = peft.LoraConfig(target_modules=["0", "1", "2"], init_lora_weights=False)


def pair(storage: str | None, folder: Path) -> list[nn.Module]:
    """The same model twice, the second one offloaded with room for one weight."""
    resident, offloaded = made(storage), made(storage)
    stowage.offload(offloaded, ram=ONE_WEIGHT, folder=folder)
    return [resident, offloaded]


def adapted(model: nn.Module, seed: int = 1) -> Any:
    torch.manual_seed(seed)
    return peft.get_peft_model(model, copy.deepcopy(CONFIG)).eval()


def on_disk(model: nn.Module) -> set[str]:
    return {row.name for row in stowage.report(model).rows if row.tier == "disk"}


@KINDS
def test_adapters_come_and_go(storage: str | None, tmp_path: Path) -> None:
    base = pair(storage, tmp_path / "w")
    plain = [model(X) for model in base]
    models = [adapted(model) for model in base]
    same(models)
    for model in models:
        torch.manual_seed(2)
        model.add_adapter("second", copy.deepcopy(CONFIG))
        model.set_adapter("second")
    same(models)
    for number, model in enumerate(models):
        model.save_pretrained(tmp_path / f"saved{number}")
        model.load_adapter(tmp_path / f"saved{number}" / "second", "third")
        model.set_adapter("third")
    same(models)
    for model, wanted in zip(models, plain, strict=True):
        model.delete_adapter("second")
        with model.disable_adapter():
            assert torch.equal(model(X), wanted)
    same(models)
    assert len(on_disk(models[1])) == 3  # the tie is one
    assert stowage.engine_report(base[1]).written == 0
    for model, wanted in zip(models, plain, strict=True):
        assert torch.equal(model.unload()(X), wanted)
    stowage.onload(base[1])
    assert torch.equal(base[1](X), plain[1]) and not on_disk(base[1])
    if storage is None:
        assert not any(isinstance(p, StowedTensor) for p in base[1].parameters())


def same(models: list[Any]) -> None:
    for _ in range(2):
        assert torch.equal(models[0](X), models[1](X))


@KINDS
def test_a_step_of_training(storage: str | None, tmp_path: Path) -> None:
    models = [adapted(model).train() for model in pair(storage, tmp_path)]
    for model in models:
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.01)
        model(X).square().mean().backward()
        optimizer.step()
    for mine, theirs in zip(*(m.named_parameters() for m in models), strict=True):
        assert mine[0] == theirs[0]
        if mine[1].requires_grad:
            assert mine[1].grad is not None and mine[1].grad.abs().sum() > 0
            assert torch.equal(mine[1].grad, theirs[1].grad), mine[0]
            assert torch.equal(mine[1], theirs[1]), mine[0]
    same(models)


@pytest.mark.parametrize("keep", ["ram", "disk"])
def test_merging_and_back(keep: str, tmp_path: Path) -> None:
    base = pair("int8", tmp_path / "w")
    file = (tmp_path / "w" / "model.safetensors").read_bytes()
    models = [adapted(model) for model in base]
    before = models[1](X)
    for number, model in enumerate(models):
        spill = {"folder": tmp_path / f"spill{number}"} if keep == "disk" else {}
        stowed_peft.merge(model, keep=keep, **spill)
    same(models)
    merged = sum(stowage.nbytes(model.base_layer.weight) for model in base[1].blocks)
    report = stowage.engine_report(base[1])
    assert report.written + report.journal == merged
    for model in models:
        stowed_peft.unmerge(model)
    assert torch.equal(models[1](X), before)
    same(models)
    whole = [stowed_peft.merge_and_unload(model) for model in models]
    assert torch.equal(whole[0](X), whole[1](X))
    assert (tmp_path / "w" / "model.safetensors").read_bytes() == file

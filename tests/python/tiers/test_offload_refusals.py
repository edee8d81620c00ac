# SPDX-License-Identifier: Apache-2.0
"""What `offload`, `onload` and `load(ram=)` refuse, and that the model is then as it was."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import stowage


def made(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256, bias=False)).eval()
    stowage.stow(model, "int8")
    return model


def refused(model: nn.Module, words: str, **given: object) -> None:
    parts = [p.parts["codes"].data_ptr() for p in model.parameters() if hasattr(p, "parts")]
    with pytest.raises(stowage.InvalidArgument, match=words):
        stowage.offload(model, **given)  # type: ignore[arg-type]
    assert parts == [p.parts["codes"].data_ptr() for p in model.parameters() if hasattr(p, "parts")]
    with pytest.raises(stowage.InvalidArgument, match="must be offloaded"):
        stowage.engine_report(model)


def test_a_folder_of_this_model_is_used_as_it_is(tmp_path: Path) -> None:
    stowage.save(made(), tmp_path)
    facts = os.stat(tmp_path / "model.safetensors")
    model = made()
    stowage.offload(model, ram="1MiB", folder=tmp_path)
    now = os.stat(tmp_path / "model.safetensors")
    assert (now.st_ino, now.st_mtime_ns) == (facts.st_ino, facts.st_mtime_ns)


def test_folders_of_others_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a model")
    refused(made(), "has other files", ram="1MiB", folder=tmp_path)
    (tmp_path / "notes.txt").unlink()
    stowage.save(made(seed=1), tmp_path)
    refused(made(), "0.weight: must have the model's values", ram="1MiB", folder=tmp_path)
    bigger = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 300, bias=False), nn.Linear(300, 9))
    stowage.stow(bigger, rules={"1.weight": "nf4", "*": "int8"})
    refused(bigger, "2.weight: must be in the file, is missing", ram="1MiB", folder=tmp_path)
    refused(bigger, r"1.weight: must be \[300, 256\] nf4", ram="1MiB", folder=tmp_path)
    smaller = nn.Sequential(made()[0])
    refused(smaller, "1.weight: must be in the model", ram="1MiB", folder=tmp_path)


def test_budgets(tmp_path: Path) -> None:
    refused(made(), "must hold the largest weight", ram=1000, folder=tmp_path)
    refused(made(), "ram must be a number of bytes", ram="much", folder=tmp_path)
    refused(made(), "reads must be one of", ram="1MiB", folder=tmp_path, reads="quick")
    for workers in (-1, 257, 2.5, True):
        refused(made(), "workers must be", ram="1MiB", folder=tmp_path, workers=workers)
    refused(made(), "timeout must be seconds above 0", ram="1MiB", folder=tmp_path, timeout=0)
    refused(
        made(), "timeout must come with workers", ram="1MiB", folder=tmp_path, timeout=1, workers=0
    )
    refused(
        made(), "lock must come with reads", ram="1MiB", folder=tmp_path, lock=True, reads="mapped"
    )
    stowage.save(made(), tmp_path / "saved")
    model = made(seed=2)
    before = model[0].weight.dequantize()
    with pytest.raises(stowage.InvalidArgument, match="must hold the largest weight"):
        stowage.load(model, tmp_path / "saved", ram=1000)
    assert torch.equal(model[0].weight.dequantize(), before)
    with pytest.raises(stowage.InvalidArgument, match="ram and plan must come without storage"):
        stowage.load(model, tmp_path / "saved", "nf4", ram="1MiB")


def test_twice_and_never(tmp_path: Path) -> None:
    model = made()
    with pytest.raises(stowage.InvalidArgument, match="must be offloaded"):
        stowage.onload(model)
    stowage.offload(model, ram="1MiB", folder=tmp_path)
    with pytest.raises(stowage.InvalidArgument, match="must not be offloaded"):
        stowage.offload(model, ram="1MiB", folder=tmp_path)
    with pytest.raises(stowage.InvalidArgument, match="must not be offloaded"):
        stowage.load(model, tmp_path, ram="1MiB")
    stowage.onload(model)
    stowage.offload(model, ram="1MiB", folder=tmp_path)


@pytest.mark.parametrize("reads", ["mapped", "buffered", "direct"])
def test_a_file_that_is_cut_short_is_an_error_not_the_end(reads: str, tmp_path: Path) -> None:
    model = made()
    stowage.offload(model, ram="100KiB", folder=tmp_path, reads=reads)
    x = torch.randn(2, 256)
    with torch.inference_mode():
        model(x)
        os.truncate(tmp_path / "model.safetensors", 9000)
        for _ in range(2):
            with pytest.raises(stowage.BadFile, match="size_changed"):
                model(x)


@pytest.mark.parametrize("at_once", [True, False], ids=["grouped", "loop"])
def test_so_it_is_of_experts(at_once: bool, tmp_path: Path) -> None:
    """Products with all groups in one op, and with one expert by its number."""
    model = nn.Module()
    model.experts = nn.Parameter(torch.randn(8, 64, 256), requires_grad=False)
    stowage.stow(model, rules={"experts": "int8:row2"})
    x = torch.randn(4, 256)
    wanted = [F.linear(x, model.experts[e]) for e in range(8)]
    stowage.offload(model, ram="80KiB", folder=tmp_path, reads="direct")

    def use() -> None:
        ends = [0, 0, 0, 4, 4, 4, 4, 4]
        y = (
            stowage.grouped_linear(x, model.experts, ends)
            if at_once
            else F.linear(x[None], model.experts[3 - 8])[0]
        )
        assert torch.equal(y, wanted[3])

    with torch.inference_mode():
        use()
        assert torch.equal(F.linear(x[:0], model.experts[1]), wanted[1][:0])
        for _ in range(2):  # others take its place
            stowage.grouped_linear(x, model.experts, [0, 1, 2, 2, 2, 3, 4, 4])
        os.truncate(tmp_path / "model.safetensors", 9000)
        for _ in range(2):
            with pytest.raises(stowage.BadFile, match="size_changed"):
                use()

# SPDX-License-Identifier: Apache-2.0
"""Models over files that another process cuts short: every use raises, and the process lives."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import stowage
from stowage._ops import library


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(512, 64)
        self.body = nn.Linear(64, 512, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.body(self.table(ids))


IDS = torch.tensor([[511, 3]])


def saved(folder: Path, storage: str = "int8") -> Path:
    torch.manual_seed(0)
    model = Model()
    stowage.stow(model, storage)
    stowage.save(model, folder)
    (path,) = folder.glob("*.safetensors")
    return path


def cut(path: Path, size: int) -> None:
    """From another process."""
    command = "import os, sys; os.truncate(sys.argv[1], int(sys.argv[2]))"
    subprocess.run([sys.executable, "-c", command, str(path), str(size)], check=True)


USES: dict[str, Callable[[Model], object]] = {
    "forward": lambda model: model(IDS),
    "linear": lambda model: model.body(torch.ones(1, 64)),
    "many rows": lambda model: model.body(torch.ones(300, 64)),
    "backward": lambda model: model.body(torch.ones(1, 64, requires_grad=True)).sum().backward(),
    "embedding": lambda model: model.table(IDS),
    "dequantize": lambda model: model.body.weight.dequantize(),
    "arithmetic": lambda model: model.body.weight + 1,
}


@pytest.mark.parametrize("storage", ["int8", "nf4:nested"])
@pytest.mark.parametrize("use", USES)
def test_a_use_of_lost_bytes_raises(tmp_path: Path, use: str, storage: str) -> None:
    path = saved(tmp_path, storage)
    model = stowage.load(Model, tmp_path, mmap=True)
    USES[use](model)
    cut(path, 4096)
    for _ in range(2):  # not only the one that finds it
        with pytest.raises(stowage.BadFile, match=r"safetensors: .*was cut short or could not"):
            USES[use](model)


def test_other_models_go_on(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    path = saved(tmp_path / "one")
    (tmp_path / "two").mkdir()
    saved(tmp_path / "two")
    one, two = (stowage.load(Model, tmp_path / name, mmap=True) for name in ("one", "two"))
    wanted = two(IDS)
    cut(path, 0)
    with pytest.raises(stowage.BadFile):
        one(IDS)
    assert torch.equal(two(IDS), wanted)
    copied = stowage.load(Model, tmp_path / "two")
    assert torch.equal(copied(IDS), wanted)


def test_a_compiled_model_raises_too(tmp_path: Path) -> None:
    path = saved(tmp_path)
    model = torch.compile(stowage.load(Model, tmp_path, mmap=True), backend="aot_eager")
    model(IDS)
    cut(path, 0)
    with pytest.raises(RuntimeError, match="was cut short or could not"):
        model(IDS)


def test_a_load_of_lost_bytes_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the opening and the reading."""
    path = saved(tmp_path)
    size, opened = path.stat().st_size, library.file_open

    def open_and_cut(name: str) -> int:
        handle: int = opened(name)
        cut(path, size - 8192)
        return handle

    monkeypatch.setattr(library, "file_open", open_and_cut)
    model = Model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(stowage.BadFile, match=r"got \d+ bytes for \d+"):
        stowage.load(model, tmp_path)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_saving_lost_bytes_raises(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    path = saved(tmp_path / "in")
    model = stowage.load(Model, tmp_path / "in", mmap=True)
    cut(path, 0)
    with pytest.raises(stowage.BadFile, match="was cut short"):
        stowage.save(model, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*")) or not (tmp_path / "out").exists()


def test_a_deleted_or_replaced_file_stays(tmp_path: Path) -> None:
    path = saved(tmp_path)
    model = stowage.load(Model, tmp_path, mmap=True)
    handle = library.file_open(str(path))
    wanted = model(IDS)
    (tmp_path / "other").write_bytes(b"short")
    (tmp_path / "other").rename(path)
    assert torch.equal(model(IDS), wanted)
    path.unlink()
    assert torch.equal(model(IDS), wanted)
    library.file_check(handle)
    library.file_close(handle)


CHILD = """
import faulthandler, mmap, os, sys, tempfile
import torch, stowage
from stowage._ops import library as ops
faulthandler.enable()
ops.file_close(ops.file_open(sys.argv[1]))  # the first mapping
with tempfile.TemporaryFile() as file:
    file.truncate(4096)
    memory = mmap.mmap(file.fileno(), 4096)
    file.truncate(0)
    memory[0]
"""


def test_a_bus_error_of_others_ends_the_process(tmp_path: Path) -> None:
    path = saved(tmp_path)
    done = subprocess.run([sys.executable, "-c", CHILD, str(path)], capture_output=True, text=True)
    assert done.returncode == -7, done
    assert "Fatal Python error: Bus error" in done.stderr

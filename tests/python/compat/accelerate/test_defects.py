# SPDX-License-Identifier: Apache-2.0
"""Defects of accelerate 1.15, rows 40 to 57 of the list, as tests of the facade: each shows that we
do better. Row 42's files, 48 and 52 are in test_offload_files.py, 43, 45, 50 and 54 for hooks in
test_hooks.py, 44, 55 and 56 in test_offload.py, 53 in test_load.py."""

from __future__ import annotations

import gc
import pickle
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from offloadable import KINDS, Model, X, made
from torch import nn

import stowage
from stowage.compat.accelerate import cpu_offload, disk_offload, dispatch_model
from stowage.compat.accelerate.utils import align_module_device

WAYS = pytest.mark.parametrize("way", ["cpu", "disk", "map"])


def offloaded(way: str, folder: Path, storage: str | None = None, seed: int = 0) -> Model:
    model = made(storage, seed)
    if way == "cpu":
        return cpu_offload(model)
    if way == "disk":
        return disk_offload(model, folder)
    places = {"": "cpu", "blocks.1": "disk", "blocks.2": "disk"}
    return dispatch_model(model, places, offload_dir=folder)


@KINDS
def test_row_40_a_folder_of_another_model(storage: str | None, tmp_path: Path) -> None:
    """Computed with the other's weights."""
    offloaded("disk", tmp_path, storage)
    with pytest.raises(ValueError, match="must have the model's values"):
        offloaded("disk", tmp_path, storage, seed=1)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "index.json").write_text("{}")
    with pytest.raises(ValueError, match="must be empty or hold a model"):
        offloaded("map", tmp_path / "theirs", storage)


@WAYS
@KINDS
def test_rows_41_57_values_are_everywhere(way: str, storage: str | None, tmp_path: Path) -> None:
    """State dicts, norms and averages were of the meta device."""
    model, whole = offloaded(way, tmp_path / "w", storage), made(storage)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    again = torch.load(tmp_path / "state.pt", weights_only=True)
    for name, value in whole.state_dict().items():
        assert torch.equal(again[name] + 0, value + 0)
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert mine.norm().item() == theirs.norm().item()


@WAYS
def test_row_42_ties_are_one_tensor(way: str, tmp_path: Path) -> None:
    """Were two, in two files."""
    model = offloaded(way, tmp_path)
    assert model.tied.weight is model.blocks[0].weight
    if way == "disk":
        size = sum(file.stat().st_size for file in tmp_path.iterdir())
        assert size < stowage.nbytes(made()) + 10_000


@WAYS
def test_row_43_a_dropped_model_is_gone(way: str, tmp_path: Path) -> None:
    """Cycles kept the weights until the collector came."""
    model = offloaded(way, tmp_path)
    model(X)
    held = [weakref.ref(parameter) for parameter in model.parameters()]
    gc.collect()
    gc.disable()
    try:
        del model
        assert all(reference() is None for reference in held)
    finally:
        gc.enable()


@WAYS
@KINDS
def test_row_45_an_exception_leaves_the_model_as_it_was(
    way: str, storage: str | None, tmp_path: Path
) -> None:
    model = offloaded(way, tmp_path, storage)
    wanted = model(X)
    before = [(id(p), p.device) for p in model.parameters()]
    for bad in (X[:, :7], X * torch.nan):
        with pytest.raises((RuntimeError, ValueError)):
            model(bad)
    assert before == [(id(p), p.device) for p in model.parameters()]
    assert torch.equal(model(X), wanted)


@WAYS
def test_row_46_a_training_step(way: str, tmp_path: Path) -> None:
    """No parameter had a gradient, without an error."""
    model, whole = offloaded(way, tmp_path), made()
    for one in (model, whole):
        one(X).square().sum().backward()
    pairs = list(zip(model.parameters(), whole.parameters(), strict=True))
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)  # type: ignore[arg-type]
    plain = [p for p in model.parameters() if not isinstance(p, stowage.StowedTensor)]
    torch.optim.SGD(plain, lr=0.1).step()
    torch.optim.SGD([b for a, b in pairs if a in set(plain)], lr=0.1).step()
    assert torch.allclose(model(X), whole(X), atol=1e-5)
    on_disk = [p for p in model.parameters() if isinstance(p, stowage.StowedTensor)]
    assert bool(on_disk) is (way != "cpu")
    if on_disk:
        with pytest.raises(stowage.StowageError, match="an adapter or a plain copy"):
            torch.optim.SGD(on_disk, lr=0.1).step()


@WAYS
@KINDS
def test_rows_47_54_writes_are_kept(way: str, storage: str | None, tmp_path: Path) -> None:
    """load_state_dict was ignored, and what was written in align_module_device was lost."""
    weight = torch.linspace(-1, 1, 160 * 160).reshape(160, 160)

    def load_state(model: Model) -> None:
        model.load_state_dict(made(storage, seed=3).state_dict())

    def data(model: Model) -> None:
        with align_module_device(model.blocks[1]):
            model.blocks[1].weight.data = weight.clone()

    def rebind(model: Model) -> None:
        with align_module_device(model.blocks[1], "cpu"):
            model.blocks[1].weight = nn.Parameter(weight.clone())

    def in_place(model: Model) -> None:
        with align_module_device(model.blocks[1]):
            model.blocks[1].weight.zero_()

    writes: list[Callable[[Model], None]] = [load_state, data, rebind, in_place]
    for number, write in enumerate(writes):
        model, whole = offloaded(way, tmp_path / f"{number}", storage), made(storage)
        with torch.no_grad():
            before = model(X)
            write(model), write(whole)
            assert not torch.equal(whole(X), before)
            assert torch.allclose(model(X), whole(X), rtol=1e-5, atol=1e-5), write


@WAYS
@KINDS
def test_row_49_two_threads(way: str, storage: str | None, tmp_path: Path) -> None:
    """Some forwards failed or were wrong."""
    model = offloaded(way, tmp_path, storage)
    inputs = [X * (i + 1) for i in range(4)]
    wanted = [model(x) for x in inputs]
    wrong: list[object] = []

    def run() -> None:
        try:
            for _ in range(20):
                results = [model(x) for x in inputs]
                if not all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True)):
                    wrong.append("value")
        except BaseException as error:
            wrong.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []


@WAYS
@KINDS
def test_row_50_pickles(way: str, storage: str | None, tmp_path: Path) -> None:
    """Could not be made."""
    model = offloaded(way, tmp_path, storage)
    assert torch.equal(pickle.loads(pickle.dumps(model))(X), model(X))


def test_row_51_changed_bytes(tmp_path: Path) -> None:
    """Gave another output, without a word."""
    model = offloaded("disk", tmp_path)
    del model
    path = tmp_path / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 64
    path.write_bytes(data)
    with pytest.raises((stowage.BadFile, ValueError), match=r"model's values|checksum|damaged"):
        offloaded("disk", tmp_path)


def test_row_56_casting_after_offloading(tmp_path: Path) -> None:
    """The wide values stayed, and the state dict could not be had."""
    from stowage.compat.accelerate.hooks import attach_layerwise_casting_hooks

    fp8 = torch.float8_e4m3fn
    for way in ("cpu", "disk"):
        model, whole = offloaded(way, tmp_path / way), made()
        attach_layerwise_casting_hooks(model, fp8, torch.float32)
        attach_layerwise_casting_hooks(whole, fp8, torch.float32)
        assert stowage.nbytes(model) == stowage.nbytes(whole)
        assert torch.equal(model(X), whole(X))
        assert len(model.state_dict()) == len(whole.state_dict())

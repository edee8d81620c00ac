# SPDX-License-Identifier: Apache-2.0
"""Defects of dispatching and loading in other packages, as tests of ours: rows 40 to 57 of the
list, numbered as in test_peer_defects.py; rows 40, 41, 44 to 47, 54 and 57 are in
test_peer_offload.py, with their like.
"""

from __future__ import annotations

import copy
import gc
import os
import pickle
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from offloadable import KINDS, ONE_WEIGHT, RAM, Model, X, made, offloaded
from torch import nn

import stowage
from stowage import StowedTensor


@KINDS
def test_row_42_a_tie_is_one_tensor_everywhere(storage: str | None, tmp_path: Path) -> None:
    """Ties were lost, and written and fetched twice."""
    model = offloaded(tmp_path, storage)
    assert model.tied.weight is model.blocks[0].weight
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert size < stowage.nbytes(model) + 16384
    model(X)
    assert stowage.engine_report(model).bytes_read < 3 * 160 * 160 * 4 + 16 * 4096
    twin = copy.deepcopy(model)
    assert twin.tied.weight is twin.blocks[0].weight
    stowage.onload(model)
    assert model.tied.weight is model.blocks[0].weight


@KINDS
def test_row_43_what_is_deleted_is_gone(storage: str | None, tmp_path: Path) -> None:
    """A circle of references kept the weights until a collection."""
    model = offloaded(tmp_path, storage)
    model(X)
    gc.collect()
    gc.disable()
    try:
        watched = [weakref.ref(p) for p in model.parameters()]
        del model
        assert not any(w() is not None for w in watched)
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    finally:
        gc.enable()


def test_row_48_every_kind_of_tensor(tmp_path: Path) -> None:
    """Names with slashes, trained, complex, empty and strided tensors were refused or lost."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            table = torch.randn(256, 200).t()
            self.all = nn.ParameterDict({"a/b": table, "c d": torch.empty(0, 3)})
            self.nothing = nn.Parameter(torch.tensor(2.5))
            self.wide = nn.Parameter(torch.randn(300, 160).bfloat16())
            self.register_buffer("complex", torch.randn(4, dtype=torch.complex64))
            self.register_buffer("mask", torch.tensor([True, False]))
            self.register_buffer("small", torch.randn(5).to(torch.float8_e4m3fn))

    model = Odd()
    before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    stowage.offload(model, ram=RAM, folder=tmp_path)
    assert {r.name for r in stowage.report(model).rows if r.tier == "disk"} == {"all.a/b", "wide"}

    def same() -> bool:
        now = model.state_dict()
        raw = {n: t.view(torch.uint8) if t.itemsize == 1 else t + 0 for n, t in now.items()}
        old = {n: t.view(torch.uint8) if t.itemsize == 1 else t for n, t in before.items()}
        return all(torch.equal(raw[name], old[name]) for name in old)

    assert same() and model.wide.requires_grad
    stowage.onload(model)
    assert same() and model.wide.requires_grad


@KINDS
def test_row_49_threads_that_change_often(storage: str | None, tmp_path: Path) -> None:
    """Hooks held the state of one forward."""
    model = made(storage)
    wanted = model(X)
    stowage.offload(model, ram=ONE_WEIGHT, folder=tmp_path, reads="buffered")
    results: list[bool] = []

    def run() -> None:
        with torch.inference_mode():
            results.extend(torch.equal(model(X), wanted) for _ in range(50))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert len(results) == 150 and all(results)


@KINDS
def test_row_50_pickles(storage: str | None, tmp_path: Path) -> None:
    """A local function on the module could not be pickled."""
    model = offloaded(tmp_path, storage)
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again(X), model(X))
    with pytest.raises(stowage.InvalidArgument, match="must be offloaded"):
        stowage.engine_report(again)


@KINDS
def test_row_51_bytes_that_changed_on_the_disk(storage: str | None, tmp_path: Path) -> None:
    """One flipped bit was computed with."""
    model = made(storage)
    stowage.offload(model, ram=RAM, folder=tmp_path, reads="direct")
    file = tmp_path / "model.safetensors"
    times = os.stat(file)
    with open(file, "r+b") as stream:  # another process, by all that the engine can see
        stream.seek(-9000, os.SEEK_END)
        byte = stream.read(1)[0]
        stream.seek(-9000, os.SEEK_END)
        stream.write(bytes([byte ^ 0x40]))
    with pytest.raises(stowage.BadFile):
        model(X)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # who hides it is found by checksums
    with pytest.raises(stowage.BadFile):
        stowage.load(Model, tmp_path, ram=RAM, verify=True)
    with pytest.raises(stowage.InvalidArgument, match="the file has others"):
        stowage.offload(made(storage), ram=RAM, folder=tmp_path)


def test_row_52_a_half_written_index(tmp_path: Path) -> None:
    """Blocked its folder for ever, with an error of the JSON reader."""
    stowage.save(made("int8"), tmp_path, shard_bytes=60_000)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(index.read_text()[:80])
    with pytest.raises(stowage.BadFile, match=r"index\.json"):
        stowage.offload(made("int8"), ram=RAM, folder=tmp_path)
    stowage.save(made("int8"), tmp_path)
    offloaded(tmp_path, "int8")


def test_row_53_missing_names_are_all_told(tmp_path: Path) -> None:
    """A strict load kept the random values of a layer that the file did not have."""
    part = nn.ModuleDict({"blocks": nn.Sequential(nn.Linear(160, 160))})
    stowage.save(part, tmp_path)
    for ram in (None, RAM):
        with pytest.raises(stowage.InvalidArgument) as caught:
            stowage.load(Model, tmp_path, ram=ram)
        for name in ("blocks.1.weight", "blocks.2.bias", "scale"):
            assert f"{name}: must be in" in str(caught.value)


def test_row_55_a_model_without_parameters(tmp_path: Path) -> None:
    """Ended in StopIteration."""
    model = nn.Sequential(nn.ReLU())
    stowage.offload(model, ram=0, folder=tmp_path)
    assert torch.equal(model(X), X.relu())
    assert stowage.engine_report(model).acquired == 0
    stowage.onload(model)


def test_row_56_stowing_and_offloading_in_either_order(tmp_path: Path) -> None:
    """The folder stayed wide, and collecting the state failed."""
    wanted = made("int8")(X)
    model = offloaded(tmp_path / "plain")
    stowage.stow(model, "int8")
    assert torch.equal(model(X), wanted)
    assert isinstance(model.blocks[0].weight, StowedTensor)
    assert model.blocks[0].weight.resting == "int8:row"
    assert stowage.state_dict(model)["blocks.0.weight"].dtype == torch.int8
    stowage.save(model, tmp_path / "saved")
    assert torch.equal(stowage.load(Model, tmp_path / "saved")(X), wanted)
    stowage.onload(model)
    assert torch.equal(model(X), wanted)

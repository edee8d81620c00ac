# SPDX-License-Identifier: Apache-2.0
"""Weights that were written to and that the budget has no room for rest in a file of their own."""

from __future__ import annotations

import copy
import gc
import os
import pickle
from pathlib import Path

import pytest
import torch
from offloadable import KINDS, ONE_WEIGHT, RAM, Model, X, made
from torch import nn

import stowage
from stowage._model.sizes import memory
from stowage._ops.errors import FileError
from stowage._tiers.disk.journal import Journal, Written, move_written, written_bytes


@KINDS
def test_the_budget_holds_whatever_is_written(storage: str | None, tmp_path: Path) -> None:
    model, other = made(storage).requires_grad_(False), made(storage, seed=1)
    size = stowage.nbytes(model.blocks[1].weight)
    ram = ONE_WEIGHT
    stowage.offload(model, ram=ram, folder=tmp_path / "weights")
    files = sorted(os.listdir(tmp_path / "weights"))
    model(X)
    model.load_state_dict(other.state_dict())
    report = stowage.engine_report(model)
    assert report.written <= ram // 2
    assert report.written + report.journal >= 3 * size  # the tie is one
    assert report.journal > 0 and "journal" in str(report)
    for _ in range(3):
        assert torch.equal(model(X), other(X))
        assert stowage.engine_report(model).held + report.written <= ram
    model.blocks[0].weight.mul_(-2)
    other.blocks[0].weight.data.mul_(-2)
    wanted = other(X)
    stowage.save(model, tmp_path / "saved")
    again = stowage.load(Model, tmp_path / "saved")
    for each in (model, again, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(each(X), wanted)
    assert sorted(os.listdir(tmp_path / "weights")) == files
    stowage.onload(model)
    assert torch.equal(model(X), wanted)
    for part in (part for p in model.parameters() for part in memory(p)):
        assert part.untyped_storage().resizable()


def test_a_new_storage_goes_there_too(tmp_path: Path) -> None:
    model, plain = made(None).requires_grad_(False), made(None)
    stowage.offload(model, ram=ONE_WEIGHT, folder=tmp_path)
    stowage.stow(model, "int8")
    stowage.stow(plain, "int8")
    report = stowage.engine_report(model)
    assert report.written <= ONE_WEIGHT // 2 and report.journal > 0
    assert torch.equal(model(X), plain(X))


def test_where_no_disk_has_room_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made("int8").requires_grad_(False)
    stowage.offload(model, ram=ONE_WEIGHT, folder=tmp_path)
    wanted = model(X)

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(FileError, match=r"must have room beyond the budget.*No space left"):
        for block in model.blocks:  # some fit the budget
            block.weight.mul_(-2)
    monkeypatch.undo()
    again = made("int8").requires_grad_(False)
    for mine, other in zip(model.blocks, again.blocks, strict=True):
        same = torch.equal(mine.weight.dequantize(), other.weight.dequantize())
        if not same:
            other.weight.mul_(-2)
            assert torch.equal(mine.weight.dequantize(), other.weight.dequantize())
    assert torch.equal(model(X), again(X))
    assert wanted.shape == X.shape


def test_room_is_taken_in_the_first_folder_that_has_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "missing", tmp_path)
    values = torch.arange(10000, dtype=torch.int16).view(100, 100)
    made_copy = journal.copy(values)
    assert torch.equal(made_copy, values) and made_copy.dtype == values.dtype
    made_copy.add_(1)
    journal.drop()
    assert torch.equal(made_copy, values + 1)
    assert os.listdir(tmp_path) == []
    assert journal.bytes == values.nbytes
    del made_copy
    gc.collect()
    assert journal.bytes == 0
    with pytest.raises(FileError, match="missing: No such file"):
        Journal(tmp_path / "missing").copy(values)


def test_empty_and_scalar_tensors_have_room_too(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for values in (torch.empty(0, 4), torch.tensor(3.5)):
        assert torch.equal(journal.copy(values), values)


def test_other_models_share_one_budget(tmp_path: Path) -> None:
    model = made("int8").requires_grad_(False)
    stowage.offload(model, ram=RAM, folder=tmp_path)
    twin = copy.deepcopy(model)
    for each in (model, twin):
        each.load_state_dict(made("int8", seed=1).state_dict())
    wanted = made("int8", seed=1)(X)
    for each in (model, twin):
        assert torch.equal(each(X), wanted)
    report = stowage.engine_report(model)
    assert report.held + report.written <= 1 << 20


@pytest.mark.parametrize(("room", "moved"), [(3, 0), (2, 1), (1, 2), (0, 3)])
@pytest.mark.parametrize("less", [0, 1])
def test_what_fits_to_the_byte_stays(room: int, moved: int, less: int, tmp_path: Path) -> None:
    model, journal = made().requires_grad_(False), Journal(tmp_path)
    stowage.offload(model, ram=RAM, folder=tmp_path)
    for block in model.blocks:
        block.weight.mul_(-2)
    size = stowage.nbytes(model.blocks[0].weight)
    move_written(model, room * size - less, journal.copy)
    assert journal.bytes == min(moved + less, 3) * size  # the tie is one


def test_what_is_not_in_memory_any_more_does_not_count(tmp_path: Path) -> None:
    model = made().requires_grad_(False)
    stowage.offload(model, ram=RAM, folder=tmp_path)
    for block in model.blocks:
        block.weight.mul_(-2)
    whole = written_bytes(model)
    model.blocks[1].weight = None
    model.blocks[2].weight = nn.Parameter(model.blocks[2].weight.to("meta"), requires_grad=False)
    assert written_bytes(model) == whole // 3 > 0


def test_bytes_are_counted_by_model() -> None:
    one, other, counted = nn.Linear(1, 1), nn.Linear(1, 1), Written()
    assert counted.total == counted.beside(one) == 0
    counted.put(one, 5)
    counted.put(other, 7)
    counted.put(one, 4)
    assert (counted.total, counted.beside(one), counted.beside(nn.Linear(1, 1))) == (11, 7, 11)
    del one
    gc.collect()
    assert counted.total == 7


def test_a_fork_has_in_common_what_is_there(tmp_path: Path) -> None:
    """And nothing that is made after it, though it may lie where something was."""
    journal, values = Journal(tmp_path), torch.arange(5000)
    before, gone = journal.copy(values), journal.copy(values)
    assert not journal.is_shared(before)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert journal.is_shared(before) and not journal.is_shared(values)
    del gone
    gc.collect()
    assert journal.bytes == values.nbytes
    assert not journal.is_shared(journal.copy(values))

# SPDX-License-Identifier: Apache-2.0
"""Weights that are written to while they are offloaded: they stay in memory, count in the budget,
and are in every copy; the file is never changed."""

from __future__ import annotations

import copy
import hashlib
import itertools
import pickle
import re
from pathlib import Path

import pytest
import torch
from offloadable import KINDS, ONE_INT8, ONE_WEIGHT, RAM, Model, X, made
from torch import nn

import stowage
from stowage._tiers.disk.engine import engine_of
from stowage._tiers.disk.journal import Journal, has_places
from stowage.tensor import StowedTensor


def checksum(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@KINDS
def test_written_weights_survive_everything(storage: str | None, tmp_path: Path) -> None:
    model, whole = made(storage).requires_grad_(False), made(storage).requires_grad_(False)
    stowage.offload(model, ram=ONE_WEIGHT, folder=tmp_path / "w")
    before = checksum(tmp_path / "w")
    for each in (model, whole):
        each.blocks[1].weight.mul_(-2)
    for _ in range(4):  # the others come and go meanwhile
        assert torch.equal(model(X), whole(X))
    twin, again = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert torch.equal(twin(X), whole(X)) and torch.equal(again(X), whole(X))
    stowage.save(model, tmp_path / "saved")
    assert torch.equal(stowage.load(Model, tmp_path / "saved")(X), whole(X))
    assert checksum(tmp_path / "w") == before
    stowage.onload(model)
    assert torch.equal(model(X), whole(X))
    assert torch.equal(twin(X), whole(X))


@KINDS
def test_they_count_in_the_budget(storage: str | None, tmp_path: Path) -> None:
    model = made(storage).requires_grad_(False)
    size = stowage.nbytes(model.blocks[1].weight)
    ram = 8 * ONE_WEIGHT
    stowage.offload(model, ram=ram, folder=tmp_path)
    for _ in range(2):
        model(X)
    first = stowage.engine_report(model)
    assert first.written == 0 and first.acquired == 8
    model.blocks[1].weight.mul_(-2)
    before = stowage.engine_report(model)
    assert before.written == size
    wanted = model(X)
    report = stowage.engine_report(model)
    assert report.since(before).acquired == 3, "the one that was written needs no engine"
    assert report.held <= ram - size and "were written to" in str(report)
    model.load_state_dict(made(storage, seed=1).state_dict())
    report = stowage.engine_report(model)
    assert report.written == 3 * size  # the tie is one
    stowage.load_state_dict(model, made(storage).state_dict())
    assert stowage.engine_report(model).written == 3 * size
    model.blocks[1].weight.mul_(-2)
    assert torch.equal(model(X), wanted)


def test_the_engine_keeps_room_for_one(tmp_path: Path) -> None:
    model = made("int8").requires_grad_(False)
    stowage.offload(model, ram=ONE_WEIGHT, folder=tmp_path)
    model.blocks[1].weight.mul_(-2)
    model.blocks[2].weight.mul_(-2)
    wanted = model(X)
    assert torch.equal(model(X), wanted)
    assert stowage.engine_report(model).misses + stowage.engine_report(model).hits > 0


WIDE = 640 * 160 * 4 + (1 << 14)  # the larger weights, with the pages at their edges
ROOM = 150 << 10  # for one of the smaller ones


def uneven() -> nn.Sequential:
    torch.manual_seed(0)
    sizes = [160, 640, 160, 160, 160, 160]
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*layers).eval().requires_grad_(False)


@pytest.mark.parametrize("first", [WIDE + ROOM, 4 * WIDE])
def test_what_is_written_leaves_room_for_the_largest(first: int, tmp_path: Path) -> None:
    """In a budget whose half would not, from the start and after `rebudget`."""
    model, twin, ram = uneven(), uneven(), WIDE + ROOM
    stowage.offload(model, ram=first, folder=tmp_path)
    if first != ram:
        stowage.rebudget(model, ram)
    for layers in (model, twin):
        for layer in layers[2:]:
            layer.weight.mul_(-2)
    for _ in range(2):
        assert torch.equal(model(X), twin(X))
        report = stowage.engine_report(model)
        assert 0 < report.written <= ROOM and report.journal > 0
        assert report.held + report.written <= ram
    stowage.rebudget(model, 4 * WIDE)  # there is room for more now
    for layers in (model, twin):
        layers[0].weight.mul_(-2)
    assert torch.equal(model(X), twin(X))
    assert stowage.engine_report(model).written >= 640 * 160 * 4


def test_what_is_written_in_one_go_stays_in_the_budget(tmp_path: Path) -> None:
    """Before a pass or a report settles what is in memory: what has no room is in the journal."""
    model = uneven()
    stowage.offload(model, ram=WIDE + ROOM, folder=tmp_path)
    for layer in model:
        layer.weight.mul_(-2)
    engine = engine_of(model)
    assert engine is not None
    sizes = [stowage.nbytes(layer.weight) for layer in model]
    assert sizes[2] <= ROOM < 2 * sizes[2]  # one of the smaller ones fits
    assert engine._journal.bytes == sum(sizes) - sizes[2]


def test_pages_of_the_journal_are_given_back(tmp_path: Path) -> None:
    model = uneven()
    stowage.offload(model, ram=WIDE + ROOM, folder=tmp_path)
    for layer in model:
        layer.weight.mul_(-2)
        layer.weight.mul_(-2)  # in the journal
    assert in_journals(tmp_path) > 0
    assert stowage.engine_report(model).journal > 0
    assert in_journals(tmp_path) == 0
    copied = Journal(tmp_path).copy(torch.ones(100, 1000))
    assert in_journals(tmp_path) == 0 and copied[99, 999] == 1
    assert in_journals(tmp_path) > 0


def in_journals(folder: Path) -> int:
    """Bytes of their pages in memory."""
    text, found = Path("/proc/self/smaps").read_text(), 0
    for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text):
        resident = re.search(r"^Rss: +(\d+) kB", mapping, re.M)
        place = mapping.split("\n", 1)[0]
        if str(folder) in place and place.endswith("(deleted)"):  # files without a name
            assert resident is not None
            found += int(resident[1]) * 1024
    return found


@pytest.mark.parametrize("first", [2 * WIDE, 4 * WIDE])
def test_half_of_the_budget_is_for_what_is_written(first: int, tmp_path: Path) -> None:
    """From the start and after `rebudget`."""
    model = uneven()
    stowage.offload(model, ram=first, folder=tmp_path)
    stowage.rebudget(model, 4 * WIDE)
    for layer in model[:2]:  # the large ones, a little less than half
        layer.weight.mul_(-2)
    report = stowage.engine_report(model)
    assert report.written == 2 * 640 * 160 * 4 and report.journal == 0


def test_what_was_written_moves_out_of_a_smaller_budget(tmp_path: Path) -> None:
    model, twin = uneven(), uneven()
    stowage.offload(model, ram=4 * WIDE, folder=tmp_path)
    for layers in (model, twin):
        for layer in layers[:2]:
            layer.weight.mul_(-2)
    stowage.rebudget(model, 3 * WIDE)  # half of it holds one of them
    report = stowage.engine_report(model)
    assert report.written == report.journal == 640 * 160 * 4
    assert torch.equal(model(X), twin(X))


def test_a_model_that_is_brought_back_has_no_places_in_files(tmp_path: Path) -> None:
    model = uneven()
    stowage.offload(model, ram=4 * WIDE, folder=tmp_path)
    assert all(has_places(layer) for layer in model)
    stowage.onload(model)
    assert not any(has_places(layer) for layer in model)


def test_a_write_elsewhere_leaves_what_is_in_memory(tmp_path: Path) -> None:
    model, other = uneven(), uneven()
    for each, name in ((model, "model"), (other, "other")):
        stowage.offload(each, ram=4 * WIDE, folder=tmp_path / name)
    model(X)
    before = stowage.engine_report(model)
    other[0].weight.mul_(-2)
    model(X)
    assert stowage.engine_report(model).since(before).misses == 0


def test_what_a_copy_wrote_is_room_again_when_it_is_gone(tmp_path: Path) -> None:
    model = uneven()
    stowage.offload(model, ram=4 * WIDE, folder=tmp_path)
    twin = copy.deepcopy(model)
    for layer in twin[:2]:
        layer.weight.mul_(-2)
    twin(X)
    written = stowage.engine_report(twin).written
    assert written == 2 * 640 * 160 * 4
    model(X)
    assert stowage.engine_report(model).held <= 4 * WIDE - written
    del twin
    for _ in range(2):
        model(X)
    assert stowage.engine_report(model).held > 4 * WIDE - written


def test_a_smaller_budget_holds_at_once(tmp_path: Path) -> None:
    model, twin, ram = uneven(), uneven(), WIDE + ROOM
    stowage.offload(model, ram=4 * WIDE, folder=tmp_path)
    assert torch.equal(model(X), twin(X))
    assert stowage.engine_report(model).held > ram
    stowage.rebudget(model, ram)
    engine = engine_of(model)
    assert engine is not None and engine.report().held <= ram  # there may be no other pass
    assert torch.equal(model(X), twin(X))
    assert stowage.engine_report(model).held <= ram


def test_a_budget_without_room_for_what_was_written_is_refused(tmp_path: Path) -> None:
    """Beside the largest weight, which would fit it alone; the former budget stays."""
    model, twin = uneven(), uneven()
    stowage.offload(model, ram=4 * WIDE, folder=tmp_path)
    for layers in (model, twin):
        layers[0].weight.mul_(-2)
    written = stowage.engine_report(model).written
    assert written > ROOM
    with pytest.raises(stowage.InvalidArgument, match=f"written to, {written}, got"):
        stowage.rebudget(model, WIDE + ROOM)
    assert torch.equal(model(X), twin(X))
    assert stowage.engine_report(model).held > ROOM


def test_a_copy_writes_for_itself(tmp_path: Path) -> None:
    model = made("int8").requires_grad_(False)
    stowage.offload(model, ram=RAM, folder=tmp_path)
    twin = copy.deepcopy(model)
    size = stowage.nbytes(model.blocks[1].weight)
    twin.blocks[1].weight.mul_(-2)
    assert stowage.engine_report(twin).written == size
    assert stowage.engine_report(model).written == size  # one engine, one budget
    model.blocks[1].weight.mul_(-2)
    assert stowage.engine_report(model).written == 2 * size
    del twin
    assert stowage.engine_report(model).written == size


def test_a_report_of_one_pass(tmp_path: Path) -> None:
    model = made("int8").requires_grad_(False)
    stowage.offload(model, ram=ONE_INT8, folder=tmp_path, reads="buffered")
    model(X)
    before = stowage.engine_report(model)
    model(X)
    once = stowage.engine_report(model).since(before)
    assert once.acquired == 4 == once.hits + once.misses + once.late + once.borrowed
    assert 0 < once.bytes_read <= before.bytes_read * 2
    assert 0 <= once.stall <= once.seconds < before.seconds + 60
    assert once.rate == once.bytes_read / once.seconds
    assert "GB/s" in str(once)


def test_a_pickle_of_plain_weights_is_plain(tmp_path: Path) -> None:
    model, whole = made(), made()
    stowage.offload(model, ram=RAM, folder=tmp_path / "w")
    again = pickle.loads(pickle.dumps(model))
    assert {type(p) for p in again.parameters()} == {nn.Parameter}
    assert torch.equal(again(X), whole(X))
    assert again.tied.weight is again.blocks[0].weight
    torch.save(dict(model.named_parameters()), tmp_path / "all.pt")
    loaded = torch.load(tmp_path / "all.pt", weights_only=True)
    assert not any(isinstance(p, StowedTensor) for p in loaded.values())
    assert all(torch.equal(loaded[n], p) for n, p in whole.named_parameters())


def test_stowing_while_offloaded_leaves_the_file(tmp_path: Path) -> None:
    model = made()
    stowage.offload(model, ram=RAM, folder=tmp_path)
    before = checksum(tmp_path)
    stowage.stow(model, "int8")
    assert stowage.engine_report(model).written == stowage.report(model).stowed_bytes
    assert checksum(tmp_path) == before
    with pytest.raises(stowage.InvalidArgument, match="must not be offloaded"):
        stowage.offload(model, ram=RAM, folder=tmp_path / "other")

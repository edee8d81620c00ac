# SPDX-License-Identifier: Apache-2.0
"""keep_master: who owns masters, what copies and files they have, and what they cost."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tied import IDS, Tied, bits, bits_at_rest, files
from torch import nn

import stowage
from stowage._model.rest.masters import master_of
from stowage._model.stamps import stamp
from stowage._model.weights import Inventory
from stowage.tensor import StowedTensor

PLACES = ["ram", "disk"]


@pytest.mark.parametrize("place", PLACES)
def test_a_copy_shares_the_masters_and_outlives_the_original(place: str, tmp_path: Path) -> None:
    model = Tied()
    before = bits(model)
    folder = tmp_path if place == "disk" else None
    stowage.stow(model, "nf4", keep_master=place, master_folder=folder)
    twin = copy.deepcopy(model)
    assert master_of(Inventory(twin).every[0]).kept is master_of(Inventory(model).every[0]).kept
    stowage.unstow(model)
    with torch.no_grad():
        model.body.weight.zero_()  # no memory in common with the copy
    assert len(files(tmp_path)) == (place == "disk")
    stowage.unstow(twin)
    assert bits(twin) == before
    del model
    assert not files(tmp_path)


def test_pickles_and_states_hold_no_master() -> None:
    layer = nn.Linear(64, 64, bias=False)
    stowage.stow(layer, "nf4")
    without, names = len(pickle.dumps(layer)), set(layer.state_dict())
    stowage.unstow(layer)
    stowage.stow(layer, "nf4", keep_master="ram")
    assert len(pickle.dumps(layer)) < without + 200 and set(layer.state_dict()) == names
    for twin in (pickle.loads(pickle.dumps(layer)), saved_and_loaded(layer)):
        assert stowage.report(twin)["weight"].master is None
        stowage.unstow(twin)
        assert not twin.weight.is_shared()


def saved_and_loaded(layer: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    loaded: nn.Module = torch.load(buffer, weights_only=False)
    return loaded


def test_a_dtype_move_keeps_the_master() -> None:
    layer = nn.Linear(16, 16)
    before = bits(layer)["weight"]
    stowage.stow(layer, "int8", keep_master="ram")
    layer.to(torch.bfloat16)
    assert stowage.report(layer)["weight"].master == "ram"
    stowage.unstow(layer)
    assert bits(layer)["weight"] == before


def test_memory_holds_on_to_the_very_tensors() -> None:
    """No second copy at any time; and back without one."""
    layer = nn.Linear(64, 64)
    address = layer.weight.data_ptr()
    stowage.stow(layer, "nf4", keep_master="ram")
    stowage.unstow(layer)
    assert layer.weight.data_ptr() == address


def test_the_file_is_ordinary_and_goes_with_its_owner(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = Tied()
    original = model.body.weight.detach().clone()
    stowage.stow(model, "int8", keep_master="disk", master_folder=tmp_path)
    (file,) = files(tmp_path)
    kept = load_file(file)
    assert kept.keys() == {"embed.weight", "body.weight", "frozen.weight"}
    assert torch.equal(kept["body.weight"], original)
    assert stowage.drop_master(model) == sum(t.nbytes for t in kept.values())
    assert not files(tmp_path) and stowage.report(model).master_bytes == 0
    assert stowage.unstow(model)["body.weight"].reason == "dequantized: no master"


def test_a_temporary_folder_goes_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    layer = nn.Linear(16, 16)
    stowage.stow(layer, "int8", keep_master="disk")
    (folder,) = files(tmp_path)
    assert len(files(folder)) == 1
    del layer
    assert not files(tmp_path)


def test_two_models_share_a_folder_and_a_part_keeps_its_own(tmp_path: Path) -> None:
    models = [nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)) for _ in range(2)]
    before = [bits(model) for model in models]
    stowage.stow(models[0], "int8", keep_master="disk", master_folder=tmp_path)
    for part in models[1]:
        stowage.stow(part, rules={"weight": "int8"}, keep_master="disk", master_folder=tmp_path)
    assert len(files(tmp_path)) == 3
    stowage.unstow(models[1][0])
    assert len(files(tmp_path)) == 2
    for model in models:
        stowage.unstow(model)
    assert [bits(model) for model in models] == before and not files(tmp_path)


def test_a_damaged_file_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    model = Tied()
    stowage.stow(model, "nf4", keep_master="disk", master_folder=tmp_path)
    (file,) = files(tmp_path)
    resting = bits_at_rest(model)
    with open(file, "r+b") as opened:
        opened.seek(-5, os.SEEK_END)
        opened.write(b"\xff")
    with pytest.raises(stowage.BadFile):
        stowage.unstow(model)
    assert bits_at_rest(model) == resting
    os.truncate(file, 1000)
    with pytest.raises(stowage.BadFile, match="bytes, got 1000"):
        stowage.unstow(model)
    stowage.drop_master(model)
    stowage.unstow(model)


def test_a_refused_stow_leaves_no_master_and_no_file(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight.data[0, 0] = torch.nan
    with pytest.raises(stowage.InvalidArgument):
        stowage.stow(model, "int8", keep_master="disk", master_folder=tmp_path)
    assert not files(tmp_path) and stowage.report(model).master_bytes == 0
    with pytest.raises(stowage.InvalidArgument, match="keep_master"):
        stowage.stow(model, "int8", keep_master="tape")
    with pytest.raises(stowage.InvalidArgument, match="folder"):
        stowage.stow(model, "int8", keep_master="ram", master_folder=tmp_path)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(stowage.FileError):
        stowage.stow(model[0], rules={"weight": "int8"}, keep_master="disk", master_folder=blocked)
    assert not isinstance(model[0].weight, StowedTensor)


@pytest.mark.parametrize("cycles", [20, pytest.param(200, marks=pytest.mark.nightly)])
def test_cycles_leave_nothing_behind(cycles: int, tmp_path: Path) -> None:
    model, before = Tied(), None

    def opened() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    for i in range(cycles):
        place = PLACES[i % 2]
        folder = tmp_path if place == "disk" else None
        stowage.stow(
            model, ["nf4", "int8", "f8_e4m3"][i % 3], keep_master=place, master_folder=folder
        )
        model(IDS)
        stowage.unstow(model)
        before = before or (opened(), bits(model))
    assert before == (opened(), bits(model)) and not files(tmp_path)


def test_a_stamp_sees_every_byte_and_its_place() -> None:
    torch.manual_seed(0)
    for count in (0, 1, 3, 4, 7, 4 * 65536 + 5, 600_001):
        octets = torch.randint(0, 256, (count,), dtype=torch.uint8)
        assert stamp([octets]) == stamp([octets.clone()])
        for place in {0, count // 3, count // 2, count - 1} if count else ():
            other = octets.clone()
            other[place] ^= 0x80
            assert stamp([other]) != stamp([octets])
    zeros = torch.zeros(64, dtype=torch.uint8)
    assert len({stamp([zeros[:n]]) for n in range(64)}) == 64
    assert stamp([zeros[1:33]]) == stamp([torch.zeros(32, dtype=torch.uint8)])
    words = torch.arange(256, dtype=torch.uint8)
    assert stamp([words]) != stamp([words.view(4, 64).flip(0).contiguous()])


CHILD = """
import sys, threading, torch, stowage
from torch import nn

def anonymous():
    lines = open("/proc/self/status").read().split("RssAnon:")[1]
    return int(lines.split()[0]) * 1024

place = sys.argv[1]
stowage.stow(nn.Linear(64, 64), "int8", keep_master=place)
model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(6)])
start, peak, stop = anonymous(), [0], threading.Event()
def sample():
    while not stop.wait(0.001):
        peak[0] = max(peak[0], anonymous())
thread = threading.Thread(target=sample)
thread.start()
report = stowage.stow(model, "int8", keep_master=place)
stop.set()
thread.join()
print(max(peak[0], anonymous()) - start, anonymous() - start, report.rest_bytes)
"""


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_ram_costs_the_original_and_disk_nothing(place: str) -> None:
    """96 MiB of weights, 24 at rest: the peak is the model and its resting weights either way."""
    done = subprocess.run([sys.executable, "-c", CHILD, place], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    peak, after, rest = map(int, done.stdout.split())
    assert peak < rest + (8 << 20)
    gone = 0 if place == "ram" else 96 << 20
    assert abs(after - (rest - gone)) < 8 << 20

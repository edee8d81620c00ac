# SPDX-License-Identifier: Apache-2.0
"""`load(mmap=True)`: plain weights lie in the file too, until they are written to."""

from __future__ import annotations

import copy
import io
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import stowage


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(300, 130), nn.Linear(130, 300)
        self.head.weight = self.table.weight
        self.inner = nn.Linear(130, 130)
        self.register_buffer("steps", torch.arange(20_000))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.relu(self.inner(self.table(ids))))


IDS = torch.tensor([[1, 39, 0]])


def is_in(tensor: Tensor, file: Path) -> bool:
    """Whether the memory of a tensor is mapped from the file, by what the system says."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, name = line.split(maxsplit=5)
        start, stop = (int(end, 16) for end in span.split("-"))
        if start <= tensor.data_ptr() < stop:
            return name == str(file)
    return False


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Net, Path]:
    torch.manual_seed(0)
    model = Net()
    stowage.save(model, tmp_path)
    return model, tmp_path / "model.safetensors"


def test_plain_weights_are_mapped_and_small_ones_copied(saved: tuple[Net, Path]) -> None:
    model, file = saved
    loaded = stowage.load(Net, file, mmap=True)
    for name in ("table.weight", "inner.weight", "steps"):
        found = loaded.get_buffer(name) if name == "steps" else loaded.get_parameter(name)
        assert is_in(found, file), name
        assert torch.equal(found, model.state_dict()[name])
    assert not is_in(loaded.inner.bias, file)
    assert loaded.head.weight is loaded.table.weight
    assert torch.equal(loaded(IDS), model(IDS))
    assert not is_in(stowage.load(Net, file).table.weight, file)
    assert not is_in(
        stowage.load(Net, file, mmap=True, compute_dtype=torch.half).table.weight, file
    )


def test_writes_are_seen_here_and_never_in_the_file(saved: tuple[Net, Path]) -> None:
    model, file = saved
    before = file.read_bytes()
    loaded, other = (stowage.load(Net, file, mmap=True) for _ in range(2))
    twin = copy.deepcopy(model)
    for net in (loaded, twin):
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        for _ in range(2):
            net(IDS).square().sum().backward()
            optimizer.step()
        with torch.no_grad():
            net.table.weight[5].zero_()
            net.inner.weight.data.mul_(2)
    for (name, one), two in zip(loaded.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, two), name
    assert torch.equal(other(IDS), model(IDS))  # each load has writes of its own
    assert file.read_bytes() == before


def test_what_is_mapped_outlives_its_name_and_is_saved_alone(saved: tuple[Net, Path]) -> None:
    model, file = saved
    loaded = stowage.load(Net, file, mmap=True)
    os.unlink(file)
    assert torch.equal(loaded(IDS), model(IDS))
    stream = io.BytesIO()
    torch.save(loaded.inner.weight, stream)
    assert stream.tell() < loaded.inner.weight.nbytes + 4096  # not the whole file with it
    again = copy.deepcopy(loaded)
    assert torch.equal(again(IDS), model(IDS))
    loaded.half().float()
    assert not is_in(loaded.inner.weight, file)


def test_odd_offsets_are_copied(tmp_path: Path) -> None:
    """Other writers need not align what they write."""
    layer = nn.Linear(200, 200, bias=False)
    state = {"weight": layer.weight.detach(), "a": torch.zeros(3, dtype=torch.uint8)}
    safetensors.torch.save_file(state, tmp_path / "m.safetensors")
    raw = (tmp_path / "m.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    odd = (size + 1).to_bytes(8, "little") + raw[8 : 8 + size] + b" " + raw[8 + size :]
    (tmp_path / "m.safetensors").write_bytes(odd)
    loaded = stowage.load(nn.Linear(200, 200, bias=False), tmp_path, mmap=True, strict=False)
    assert torch.equal(loaded.weight, layer.weight)
    assert not is_in(loaded.weight, tmp_path / "m.safetensors")


def test_a_file_that_is_cut_short_leaves_zeros(saved: tuple[Net, Path]) -> None:
    model, file = saved
    loaded = stowage.load(Net, file, mmap=True)
    os.truncate(file, 4096)
    found = loaded.table.weight.detach().clone()  # not the end of the process
    assert int((found[-1] == 0).sum()) == found.shape[1]
    assert not torch.equal(found, model.table.weight)

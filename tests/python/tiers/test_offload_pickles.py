# SPDX-License-Identifier: Apache-2.0
"""`torch.save` of an offloaded model: each weight once, ties stay ties."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import stowage


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(300, 256), nn.Linear(256, 300, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids))


def memory(tensor: Tensor) -> int:
    whole = tensor.parts["codes"] if isinstance(tensor, stowage.StowedTensor) else tensor
    return whole.untyped_storage().data_ptr()


@pytest.mark.parametrize("storage", [None, "int8", "nf4", "f8_e4m3"])
def test_ties_are_written_once(storage: str | None, tmp_path: Path) -> None:
    model = Tied()
    if storage is not None:
        stowage.stow(model, storage)
    expected = model(torch.tensor([[1, 39]]))
    sizes = []
    for offloaded in (False, True):
        if offloaded:
            stowage.offload(model, ram="1MiB", folder=tmp_path)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        sizes.append(file.tell())
        file.seek(0)
        state = torch.load(file, weights_only=True)
        assert memory(state["table.weight"]) == memory(state["head.weight"])
        again = Tied()
        stowage.load_state_dict(again, state)
        assert torch.equal(again(torch.tensor([[1, 39]])), expected)
    assert abs(sizes[1] - sizes[0]) < 4096


def test_a_copy_of_an_offloaded_plain_weight_may_be_written(tmp_path: Path) -> None:
    """Its memory is a file's, mapped read-only, which must not become an ordinary tensor's."""
    model = Tied()
    stowage.offload(model, ram="1MiB", folder=tmp_path)
    before = model.table.weight.dequantize().clone()
    for made in (copy.copy(model.table.weight), copy.deepcopy(model.table.weight)):
        with torch.no_grad():
            made.zero_()
        assert not made.count_nonzero()
    assert torch.equal(model.table.weight.dequantize(), before)

# SPDX-License-Identifier: Apache-2.0
"""What code for accelerate's big models relies on, asked of accelerate and of the facade in one
process: the same values and kinds of errors, and warnings that hold accelerate's words."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import stowage.compat.accelerate as ours

theirs = pytest.importorskip("accelerate")
Call = Callable[[Any, Path], Any]
SPLIT = {"first": "cpu", "last": "cpu"}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


def checkpoint(folder: Path, **more: torch.Tensor) -> str:
    state = {name: torch.full_like(value, 0.5) for name, value in Small().state_dict().items()}
    save_file(state | more, folder / "model.safetensors")
    return str(folder)


def dispatched(side: Any, folder: Path, **kwargs: Any) -> Any:
    where = checkpoint(folder, extra=torch.zeros(2), **kwargs.pop("more", {}))
    model = side.load_checkpoint_and_dispatch(Small(), where, **kwargs)
    return model(torch.ones(2, 8))


def filled(side: Any, folder: Path, **kwargs: Any) -> Any:
    model = Small()
    where = checkpoint(folder, extra=torch.zeros(2))
    side.utils.modeling.load_checkpoint_in_model(model, where, **kwargs)
    return model(torch.ones(2, 8))


def put(side: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    model = Small()
    side.utils.modeling.set_module_tensor_to_device(model, name, *args, **kwargs)
    return model(torch.ones(2, 8))


CALLS: dict[str, Call] = {
    "an extra key and no map": lambda s, at: filled(s, at),
    "an extra key and a whole map": lambda s, at: filled(s, at, device_map={"": "cpu"}),
    "an extra key and a split map": lambda s, at: filled(s, at, device_map=SPLIT),
    "dispatched with an extra key": lambda s, at: dispatched(s, at, device_map=SPLIT),
    "dispatched, strict is named": lambda s, at: dispatched(s, at, device_map=SPLIT, strict=False),
    "dispatched without a map": lambda s, at: dispatched(s, at),
    "dispatched automatically": lambda s, at: dispatched(s, at, device_map="auto"),
    "a word that is no map": lambda s, at: dispatched(s, at, device_map="best"),
    "strict": lambda s, at: filled(s, at, device_map=None, strict=True),
    "a module without a device": lambda s, at: filled(s, at, device_map={"first": "cpu"}),
    "a disk without a folder": lambda s, at: filled(s, at, device_map={"": "disk"}),
    "no such file": lambda s, at: s.load_checkpoint_and_dispatch(Small(), str(at / "none")),
    "keys of no module": lambda s, at: s.utils.modeling.check_device_map(
        Small(), SPLIT | {"other": "cpu"}
    ),
    "a map with a hole": lambda s, at: s.utils.modeling.check_device_map(Small(), {"last": "cpu"}),
    "a tensor": lambda s, at: put(s, "last.weight", "cpu", value=torch.ones(4, 8)),
    "a tensor of another shape": lambda s, at: put(s, "last.weight", "cpu", value=torch.ones(2)),
    "a tensor that is not there": lambda s, at: put(s, "last.other", "cpu"),
    "a size": lambda s, at: s.utils.modeling.convert_file_size_to_int("1.5GiB"),
    "no size": lambda s, at: s.utils.modeling.convert_file_size_to_int("5XB"),
    "no dtype": lambda s, at: s.utils.modeling.dtype_byte_size("nothing"),
}
# What tests and scripts look for in what accelerate says.
WORDS = {
    "keys of no module": "device_map keys do not match any submodules",
    "an extra key and no map": "were not used when",
    "an extra key and a split map": "were not used when",
}


@pytest.mark.parametrize("name", CALLS)
def test_same_outcome(name: str, tmp_path: Path, caplog: Any) -> None:
    outcomes = []
    for side in (ours, theirs):
        caplog.clear()
        folder = tmp_path / side.__name__
        folder.mkdir()
        with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.WARNING):
            warnings.simplefilter("always")
            try:
                answer = CALLS[name](side, folder)
            except Exception as error:
                answer = error
        told = [str(w.message) for w in caught] + [r.getMessage() for r in caplog.records]
        outcomes.append((answer, told))
    (mine, told_here), (peer, told_there) = outcomes
    if isinstance(peer, Exception):
        assert isinstance(mine, type(peer)), mine  # who catches theirs catches ours
    elif isinstance(peer, torch.Tensor):
        assert torch.equal(mine, peer)
    else:
        assert mine == peer
    word = WORDS.get(name)
    if word is not None:
        for told in (told_here, told_there):
            assert any(re.search(word, text) for text in told), told

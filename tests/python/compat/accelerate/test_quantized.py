# SPDX-License-Identifier: Apache-2.0
"""Layers of bitsandbytes itself: in memory they compute as before, a folder refuses them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from stowage.compat import accelerate
from stowage.compat.accelerate.utils import (
    OffloadedWeightsLoader,
    compute_module_sizes,
    offload_state_dict,
    set_module_tensor_to_device,
)

bnb = pytest.importorskip("bitsandbytes")
KINDS = pytest.mark.parametrize("kind", ["Params4bit", "Int8Params"])
X = torch.linspace(-1, 1, 512).reshape(2, 256)


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    quantized: nn.Module
    if kind == "Params4bit":
        quantized = bnb.nn.LinearNF4(256, 256)
    else:
        quantized = bnb.nn.Linear8bitLt(256, 256, has_fp16_weights=False)
    return nn.Sequential(nn.Linear(256, 256), quantized.to("cpu"))


@KINDS
def test_in_memory_they_are_held(kind: str) -> None:
    model = made(kind)
    assert type(model[1].weight).__name__ == kind
    wanted = model(X)
    assert torch.equal(accelerate.cpu_offload(model)(X), wanted)
    assert torch.equal(accelerate.dispatch_model(model, {"": "cpu"})(X), wanted)
    assert compute_module_sizes(model)["1.weight"] <= 256 * 256
    set_module_tensor_to_device(model, "1.weight", "cpu", value=model[1].weight.data)
    assert type(model[1].weight).__name__ == kind
    assert torch.equal(model(X), wanted)


@KINDS
def test_a_folder_refuses_them_and_says_what_to_do(kind: str, tmp_path: Path) -> None:
    model = made(kind)
    wanted = model(X)
    for call in (
        lambda: accelerate.disk_offload(model, tmp_path),
        lambda: accelerate.dispatch_model(model, {"0": "disk", "1": "cpu"}, offload_dir=tmp_path),
    ):
        with pytest.raises(ValueError, match=rf"bitsandbytes, is {kind}; stowage\.stow"):
            call()
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(model(X), wanted)


@KINDS
def test_their_states_are_files(kind: str, tmp_path: Path) -> None:
    state = made(kind).state_dict()
    offload_state_dict(tmp_path, state)
    loader = OffloadedWeightsLoader(save_folder=tmp_path)
    assert all(torch.equal(loader[name], value.detach()) for name, value in state.items())

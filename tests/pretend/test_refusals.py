# SPDX-License-Identifier: Apache-2.0
"""Arguments of `offload` to a device that contradict each other, or that cannot be met."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import stowage

DEVICE = torch.device("pretend:0")


def made() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(192, 192) for _ in range(4))).eval()
    stowage.stow(model, "int8")
    return model


def test_refusals(tmp_path: Path) -> None:
    told = [
        ({"device": DEVICE}, ["accelerator must be at least", "got None"]),
        ({"device": DEVICE, "accelerator": 100}, ["the largest weight", "got 100"]),
        ({"accelerator": 100}, ["accelerator=100", "device='cpu'", "folder and ram must be given"]),
        ({"folder": tmp_path}, ["ram must come with folder"]),
        ({"ram": "1GiB"}, ["folder must come with ram"]),
        ({"device": DEVICE, "accelerator": 1 << 20, "ram": 10}, ["ram must hold the 150528 bytes"]),
        ({"device": DEVICE, "accelerator": 1 << 20, "reads": "direct"}, ["must come with folder"]),
        ({"device": "pretend:9", "accelerator": 1}, ["one that is here", "pretend:2"]),
        (
            {"device": DEVICE, "accelerator": 1 << 20, "device_map": {"0": "disk", "1": 9}},
            ["'0' must come with folder", "'1' must be in ram or disk, got 9"],
        ),
    ]
    for arguments, texts in told:
        model = made()
        before = {name: t for name, t in model.state_dict(keep_vars=True).items()}
        with pytest.raises(stowage.InvalidArgument) as caught:
            stowage.offload(model, **arguments)  # type: ignore[arg-type]
        assert all(text in str(caught.value) for text in texts), str(caught.value)
        assert "nothing was changed" in str(caught.value)
        after = model.state_dict(keep_vars=True)
        assert all(after[name] is tensor for name, tensor in before.items())
        assert not model._forward_pre_hooks


def test_a_model_is_offloaded_once() -> None:
    model = made()
    stowage.offload(model, device=DEVICE, accelerator="1MiB")
    with pytest.raises(stowage.InvalidArgument, match="onload it first"):
        stowage.offload(model, device=DEVICE, accelerator="1MiB")
    stowage.onload(model)
    with pytest.raises(stowage.InvalidArgument, match="must be offloaded"):
        stowage.onload(model)
    with pytest.raises(stowage.InvalidArgument, match="must be offloaded"):
        stowage.engine_report(model)


def test_a_model_that_is_elsewhere() -> None:
    model = made().to(DEVICE)
    with pytest.raises(stowage.InvalidArgument, match="the model must be on the CPU"):
        stowage.offload(model, device=DEVICE, accelerator="1MiB")


def test_the_number_that_a_small_accelerator_is_told_does() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 256))
    stowage.stow(model, "int8")
    with pytest.raises(stowage.InvalidArgument, match="at least") as refused:
        stowage.offload(model, device=DEVICE, accelerator="1KiB")
    told = re.search(r"at least (\d+) bytes", str(refused.value))
    assert told is not None
    stowage.offload(model, device=DEVICE, accelerator=int(told[1]))
    stowage.onload(model)
    with pytest.raises(stowage.InvalidArgument):
        stowage.offload(model, device=DEVICE, accelerator=int(told[1]) - 1)

# SPDX-License-Identifier: Apache-2.0
"""Ops on weights that are there copy nothing over the link: such a copy would hold the host up, and
break the capture of a graph."""

from __future__ import annotations

import pytest
import torch
from pretend_device import counted, speeds, times
from torch import nn
from torch.nn import functional as F

import stowage
from stowage._tiers.device.link import Link

DEVICE = torch.device("pretend:0")
ROOM = 64 << 20
STORAGES = [
    *("f8_e4m3", "f8_e4m3:row", "int8:row", "int8:block32:f16", "int8:block64:zero", "nf4"),
    *("nf4:nested", "fp4", "nf4:torchao", "mxfp4", "mxfp8_e4m3", "mxint8", "nvfp4", "q4_k", "q6_k"),
    *("f8_e4m3:block128x128", "int4:block64", "int4:block128:f16:zero", "int3:block128:bf16"),
    *("int4:block64:bf16:zero_sum", "uint4:block64:bf16:zero_rounded"),
]


@pytest.mark.parametrize("storage", STORAGES)
def test_ops_copy_nothing(storage: str) -> None:
    torch.manual_seed(0)
    weight = stowage.quantize(torch.randn(256, 512), storage).to(DEVICE)
    x, g = torch.ones(4, 512, device=DEVICE), torch.ones(4, 256, device=DEVICE)
    indices = torch.tensor([1, 2], device=DEVICE)

    def ops() -> None:
        F.linear(x, weight)
        g @ weight
        F.embedding(indices, weight)
        weight.dequantize()

    with counted(), torch.no_grad():
        ops()
        with speeds(copy=1):
            before = times()
            ops()
            assert times().since(before).copied == 0


def layers(count: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(192, 192, bias=False) for _ in range(count))).eval()
    stowage.stow(model, "int8")
    return model


def test_a_graph_reads_the_ring_that_holds_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = layers(), torch.ones(3, 192, device=DEVICE)
    with counted(lazy=False), torch.no_grad():
        stowage.offload(model, device=DEVICE, accelerator=ROOM)
        wanted = model(x).cpu()
        model(x)
        told = stowage.engine_report(model)
        monkeypatch.setattr(Link, "is_captured", lambda self: True)
        assert torch.equal(model(x).cpu(), wanted)
        once = stowage.engine_report(model).since(told).device
        assert once is not None and once.uses == once.bytes_copied == 0
        monkeypatch.undo()
        stowage.onload(model)


@pytest.mark.parametrize("runs", [0, 3])
def test_a_graph_of_a_smaller_ring_is_refused(runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = layers(), torch.ones(3, 192, device=DEVICE)
    size = stowage.nbytes(model)
    with counted(), torch.no_grad():
        stowage.offload(model, device=DEVICE, accelerator=size // 2 + 2048)
        for _ in range(runs):
            model(x)
        monkeypatch.setattr(Link, "is_captured", lambda self: True)
        with pytest.raises(stowage.Unsupported, match=r"all weights in the ring.* must hold \d+"):
            model(x)
        monkeypatch.undo()
        model(x)
        stowage.onload(model)


def test_a_graph_beside_a_copy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose end nobody has seen."""
    model, x = layers(), torch.ones(3, 192, device=DEVICE)
    with counted(lazy=False), torch.no_grad():
        stowage.offload(model, device=DEVICE, accelerator=ROOM)
        with speeds(copy=1e9):
            model(x)
            monkeypatch.setattr(Link, "is_captured", lambda self: True)
            with pytest.raises(stowage.Unsupported, match="run the model twice"):
                model(x)
            monkeypatch.undo()
        stowage.onload(model)

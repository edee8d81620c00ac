# SPDX-License-Identifier: Apache-2.0
"""Copies go on beside the work: by the pretended clock of a link and a device, which no other
program on this machine moves."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from pretend_device import Times, counted, speeds, times
from torch import nn

import stowage

DEVICE = torch.device("pretend:0")
LAYERS, WIDE = 12, 512
ROOM = 64 << 20


def made(storage: str = "int8") -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDE, WIDE, bias=False) for _ in range(LAYERS))).eval()
    stowage.stow(model, storage)
    return model


@dataclass(frozen=True)
class Pass:
    times: Times
    copies: int  # bytes


def one_pass(model: nn.Module) -> Pass:
    """Learnt by then, from the first work to its result on the CPU."""
    x = torch.ones(4, WIDE, device=DEVICE)
    for _ in range(3):
        model(x).cpu()
    before, told = times(), stowage.engine_report(model)
    model(x).cpu()
    report = stowage.engine_report(model).since(told).device
    assert report is not None
    return Pass(times().since(before), report.bytes_copied)


def offloaded(share: float, pin: bool, storage: str = "int8") -> tuple[nn.Module, int]:
    model = made(storage)
    size = stowage.nbytes(model)
    room = ROOM if share == 1 else int(share * size) + 4096
    stowage.offload(model, device=DEVICE, accelerator=room, pin=ROOM if pin else 0)
    return model, size


WORK = {"work": 1000.0, "byte_of_work": 0.01}


def computing() -> float:
    """What the work of a pass takes when nothing crosses but its result."""
    with counted(lazy=False), torch.no_grad(), speeds(**WORK):
        model, _ = offloaded(1, pin=True)
        found = one_pass(model)
        assert found.copies == 0 and found.times.host == pytest.approx(found.times.computed)
        return found.times.computed


@pytest.mark.parametrize("pin", [True, False])
@pytest.mark.parametrize("ratio", [0.3, 1, 4])
def test_a_pass_takes_what_the_slower_of_both_does(ratio: float, pin: bool) -> None:
    """`ratio`: of the time of the link to that of the work, were all weights copied in each pass. A
    pass that the link bounds keeps it busy for 0.95 of the time."""
    work = computing()
    with counted(lazy=False), torch.no_grad():
        model, size = offloaded(1 / 3, pin)
        with speeds(**WORK, copy=500, byte_copied=ratio * work / size):
            found = one_pass(model).times
        longest = max(found.copied, found.computed)
        one = ratio * work / LAYERS + 500  # copy of a layer
        assert found.host >= longest
        assert found.host <= 1.05 * longest + one
        if ratio == 4:
            assert found.copied >= 0.95 * (found.host - one)
        stowage.onload(model)


def test_without_streams_each_waits_for_the_other() -> None:
    """So that the test above could fail."""
    work = computing()
    with counted(streams=False), torch.no_grad():
        model, size = offloaded(1 / 3, pin=True)
        with speeds(**WORK, copy=500, byte_copied=work / size):
            found = one_pass(model).times
        assert found.host == pytest.approx(found.copied + found.computed)
        assert found.copied > 0.5 * found.computed


def copies_and_fetches(pin: bool, storage: str) -> tuple[float, int]:
    """Of a pass, on a clock on which only the number of copies counts."""
    with counted(lazy=False), torch.no_grad():
        model, _ = offloaded(1 / 3, pin, storage)
        x = torch.ones(4, WIDE, device=DEVICE)
        model(x)
        told = stowage.engine_report(model)
        with speeds(copy=1):
            before = times()
            model(x)
            copies = times().since(before).copied
        report = stowage.engine_report(model).since(told).device
        stowage.onload(model)
    assert report is not None
    return copies, report.misses + report.ahead


@pytest.mark.parametrize(
    "storage", ["int8", "nf4:block64:nested", "q4_k", "int4:block64:bf16:zero"]
)
def test_a_pinned_weight_crosses_as_one_copy(storage: str) -> None:
    """Codes and scales."""
    copies, fetches = copies_and_fetches(True, storage)
    assert copies == fetches > 0


def test_an_unpinned_weight_crosses_in_tiles() -> None:
    copies, fetches = copies_and_fetches(False, "nf4:block64:nested")
    assert copies == fetches > 0

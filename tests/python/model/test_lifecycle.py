# SPDX-License-Identifier: Apache-2.0
"""A stowed model lives like any other: copied, pickled, its class swapped, called with other
parameters; and many cycles of stow, failure and unstow leave nothing behind."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import stowage
from stowage.tensor import StowedTensor


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mlp = nn.Embedding(32, 64), nn.Linear(64, 64)
        self.lm_head = nn.Linear(64, 32, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(torch.relu(self.mlp(self.embed(ids))))


class Doubled(Model):
    def forward(self, ids: Tensor) -> Tensor:
        return 2 * super().forward(ids)


IDS = torch.arange(8)
COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def resting(storage: str = "nf4:block64:nested") -> Model:
    torch.manual_seed(0)
    model = Model()
    stowage.stow(model, storage, exact=True)
    return model


@pytest.mark.parametrize("copied", [*COPIES.values(), saved], ids=[*COPIES, "torch.save"])
def test_a_copy_is_whole_and_its_own(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = resting()
    wanted = model(IDS)
    twin = copied(model)
    assert torch.equal(twin(IDS), wanted)
    assert twin.lm_head.weight is twin.embed.weight
    assert [row.relative_error for row in stowage.report(twin).stowed] == [
        row.relative_error for row in stowage.report(model).stowed
    ]
    with torch.no_grad():
        twin.mlp.weight.zero_()
    assert torch.equal(model(IDS), wanted) and not torch.equal(twin(IDS), wanted)
    stowage.unstow(twin)
    assert isinstance(model.mlp.weight, StowedTensor)


def test_a_swapped_class_is_called() -> None:
    model = resting()
    wanted = model(IDS)
    model.__class__ = Doubled
    assert torch.equal(model(IDS), 2 * wanted)
    assert "forward" not in vars(model) and not model._forward_pre_hooks


def test_functional_call_takes_stowed_and_plain_parameters() -> None:
    model, other = resting(), Model()
    wanted, plain = model(IDS), other(IDS)
    call = torch.func.functional_call
    assert torch.equal(call(model, dict(other.named_parameters()), (IDS,)), plain)
    assert torch.equal(call(other, dict(model.named_parameters()), (IDS,)), wanted)
    bias = {"mlp.bias": torch.zeros(64, requires_grad=True)}
    gradient = torch.func.grad(lambda p: call(model, p, (IDS,)).square().sum())(bias)
    assert gradient["mlp.bias"].abs().sum() > 0
    assert torch.equal(model(IDS), wanted) and isinstance(model.mlp.weight, StowedTensor)


# --- cycles ---------------------------------------------------------------------------------------

CYCLES = """
import ctypes, gc, os, sys, torch, stowage
from torch import nn

def anonymous():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the C heap keeps after free() is no leak
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1])

def cycle(model, i):
    storage = ("f8_e4m3:row", "int8:block32", "nf4:block64:nested")[i % 3]
    master = {} if i % 2 else {"keep_master": "ram"}
    stowage.stow(model, storage, exact=bool(i % 2), **master)
    x = torch.randn(4, 512)
    with torch.no_grad():
        model(x)
    model(x.requires_grad_()).sum().backward()
    handle = model[2].register_forward_hook(lambda *_: 1 / 0)
    for attempt in (lambda: model(x), lambda: stowage.stow(model, rules={"nothing": "int8"})):
        try:
            attempt()
        except (ZeroDivisionError, ValueError):
            pass
        else:
            raise SystemExit("did not fail")
    handle.remove()
    stowage.unstow(model)
    model.zero_grad()

torch.set_num_threads(1)
model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)), nn.LayerNorm(512))
ballast = torch.ones(24 << 20)  # 96 MiB, so that 1 % is not the noise of the C heap
for i in range(12):  # what first calls allocate for good
    cycle(model, i)
before, files = anonymous(), len(os.listdir("/proc/self/fd"))
for i in range(int(sys.argv[1])):
    cycle(model, i)
print(before, anonymous(), files, len(os.listdir("/proc/self/fd")))
"""


def cycles(count: int) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", CYCLES, str(count)], text=True, check=True,
                         capture_output=True, env=env)  # fmt: skip
    before, after, files, files_after = map(int, run.stdout.split())
    assert files_after == files
    assert after <= before * 1.01, (before, after)


@pytest.mark.slow
def test_cycles_leave_nothing_behind() -> None:
    cycles(8)


@pytest.mark.nightly
def test_two_hundred_cycles_leave_nothing_behind() -> None:
    cycles(200)


def test_a_deleted_model_frees_its_weights_at_once() -> None:
    """No cycle of references holds them until the collector runs."""
    gc.collect()
    gc.disable()
    try:
        model = resting()
        model(IDS)
        codes = model.mlp.weight.parts["codes"].untyped_storage()
        memory = codes._weak_ref()
        del codes, model
        assert torch.UntypedStorage._expired(memory)
        torch.UntypedStorage._free_weak_ref(memory)
    finally:
        gc.enable()

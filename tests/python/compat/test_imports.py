# SPDX-License-Identifier: Apache-2.0
"""Importing a facade leaves all weights as they are, but for those that are of its kind."""

from __future__ import annotations

import fresh
import pytest

CHILD = """
import copy, importlib, sys
import torch
import stowage
from stowage._ops import storage as _storage
from torch import nn

STORAGES = ["bf16", "f8_e4m3", "int8", "int8:tensor", "f8_e4m3:block32", "nf4", "fp4",
            "nf4:block64:nested", "nf4:torchao"]
CALLS = {
    "own dtype": lambda w: w.to(w.dtype),
    "own dtype by name": lambda w: w.to(dtype=torch.float32),
    "device and dtype": lambda w: w.to("cpu", torch.float32),
    "device": lambda w: w.to("cpu"),
    "a copy": lambda w: w.to("cpu", copy=True),
    "like another": lambda w: w.to(torch.ones(1)),
    "bf16": lambda w: w.to(torch.bfloat16),
    "float": lambda w: w.float(),
    "half": lambda w: w.half(),
    "cpu": lambda w: w.cpu(),
    "clone": lambda w: w.clone(),
    "detach": lambda w: w.detach(),
    "deepcopy": copy.deepcopy,
    "rows": lambda w: w[:32],
    "view": lambda w: w.view(-1),
    "zeros": lambda w: w.new_zeros(3),
    "product": lambda w: w @ torch.ones(256, 2),
    "a module": lambda w: (lambda m: setattr(m, "weight", w) or m.half().weight)(nn.Linear(1, 1)),
    "a name": lambda w: [getattr(w, name, None) for name in ("block_size", "quant_state", "SCB")],
}


def seen():
    torch.manual_seed(0)
    found = {}
    for storage in STORAGES:
        w = stowage.quantize(torch.randn(128, 256), storage)
        for name, held in (("tensor", w), ("Parameter", nn.Parameter(w.clone(), False))):
            for call, run in CALLS.items():
                if call == "a module" and name == "tensor":
                    continue
                made = run(held)
                tensor = isinstance(made, torch.Tensor)
                facts = (made.dtype, made.shape, made.float().sum()) if tensor else made
                found[storage, name, call] = (type(made).__name__, made is held, str(facts))
    return found


before = seen()
for facade in sys.argv[1:]:
    importlib.import_module("stowage.compat." + facade)
after = seen()
print(*("/".join(key) for key in before if before[key] != after[key]), sep="\\n")
"""
FACADES = ["accelerate", "bitsandbytes", "diffusers", "torchao", "transformer_engine"]
OWN = {  # docs/compat.md says so
    "nf4:torchao/tensor/own dtype",
    "nf4:torchao/tensor/own dtype by name",
    "nf4:torchao/tensor/device and dtype",
    "nf4:torchao/tensor/like another",
    "nf4:torchao/tensor/a name",
    "nf4:torchao/Parameter/a name",
}


@pytest.mark.slow
def test_importing_the_facades_changes_no_other_weight() -> None:
    done = fresh.run(CHILD, *FACADES)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split("\n")) - {""} == OWN

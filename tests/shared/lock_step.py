# SPDX-License-Identifier: Apache-2.0
"""MasterOptimizer beside torch's optimizer over plain fp32 masters that are quantized in every
forward: what they see, and all values, must be equal after each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from kept_training import Mlp, oracle, resting
from surroundings import SURROUNDINGS, Model
from torch import Tensor

from stowage.training import MasterOptimizer

STORAGE = "f8_e4m3:tensor"
Make = Callable[[Any, Any], Any]  # an optimizer, of a class (or ours over it) and parameters


def adamw(**options: Any) -> Make:
    return lambda make, model: make(torch.optim.AdamW)(
        model.parameters(), **{"lr": 2e-3, "foreach": False, **options}
    )


def sgd(make: Any, model: Model) -> Any:
    return make(torch.optim.SGD)(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def lbfgs(search: str | None) -> Make:
    return lambda make, model: make(torch.optim.LBFGS)(
        model.parameters(), lr=0.5, max_iter=4, line_search_fn=search
    )


def grouped(make: Any, model: Model) -> Any:
    groups = [
        {"params": [model.up.weight, model.up.bias], "lr": 0.01, "weight_decay": 0.1},
        {"params": model.down.weight},
    ]
    optimizer = make(torch.optim.AdamW)(groups, lr=1e-3, foreach=False)
    optimizer.add_param_group({"params": [model.down.bias], "lr": 0.02})
    return optimizer


OPTIMIZERS: dict[str, Make] = {
    "adamw": adamw(),
    "foreach": adamw(foreach=True),
    "fused": adamw(foreach=None, fused=True),
    "tensor lr, amsgrad, maximize": adamw(lr=torch.tensor(2e-3), amsgrad=True, maximize=True),
    "sgd": sgd,
    "several groups": grouped,
    "named": lambda make, model: make(torch.optim.AdamW)(model.named_parameters(), foreach=False),
}
CASES = [("adamw", name) for name in SURROUNDINGS]
CASES += [(name, "scaler, clipped") for name in OPTIMIZERS if name != "adamw"]
CASES += [(name, "one cycle") for name in ("foreach", "fused", "several groups", "named")]
OPTIMIZERS |= {"lbfgs": lbfgs(None), "lbfgs, strong Wolfe": lbfgs("strong_wolfe")}
CASES += [("lbfgs", "closure"), ("lbfgs, strong Wolfe", "closure")]


def ours(optimizer_class: Any) -> Any:
    return lambda params, **options: MasterOptimizer(optimizer_class, params, **options)


def theirs(optimizer_class: Any) -> Any:
    return optimizer_class


def master_values(model: Model, optimizer: Any) -> list[Tensor]:
    """The fp32 values of every parameter, resting or not."""
    state = optimizer.state
    return [
        (state.get(p, {}).get("master", p) if isinstance(model, Mlp) else p).detach().clone()
        for p in model.parameters()
    ]


def pair(optimizer: Make, storage: str = STORAGE) -> list[tuple[Model, Any]]:
    """Resting weights and ours; plain masters and torch's own."""
    mine, plain = resting(storage), oracle(storage, torch.float32, None)
    return [(mine, optimizer(ours, mine)), (plain, optimizer(theirs, plain))]


def in_lock_step(run: Any, couple: list[tuple[Model, Any]]) -> None:
    (mine, optimizer), (plain, other) = couple
    started = False
    for seen, wanted in zip(run(mine, optimizer), run(plain, other), strict=True):
        assert seen == wanted
        if any("master" in state for state in optimizer.state.values()):
            started = True
            pairs = zip(master_values(mine, optimizer), master_values(plain, other), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)
    assert started and optimizer.masters

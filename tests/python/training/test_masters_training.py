# SPDX-License-Identifier: Apache-2.0
"""MasterOptimizer and from_masters: bit for bit what plain masters and their casts give."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from kept_training import (
    losses,
    optimizer_of,
    oracle,
    parts_of_flat_weights,
    refused_alike,
    resting,
    sharded_equals_whole,
)
from ranks import on_ranks
from torch import nn

import stowage
from stowage.training import (
    MasterOptimizer,
    from_masters,
    has_init_value,
    init_value,
    quantized_init,
    take_init_value,
)

STORAGES = ["f8_e4m3:tensor", "f8_e4m3:row", "int8:block32", "nf4", "nf4:nested", "bf16"]
CASES: list[Any] = [
    ("f8_e4m3:tensor", torch.float32, None),
    ("f8_e4m3:tensor", torch.bfloat16, torch.bfloat16),
    ("nf4:nested", torch.float32, None),
    ("int8:block32", torch.bfloat16, torch.bfloat16),
]


@pytest.mark.parametrize(("storage", "dtype", "via"), CASES)
def test_loss_curves_are_those_of_plain_masters(storage: str, dtype: torch.dtype, via: Any) -> None:
    plain = oracle(storage, dtype, via)
    want = losses(plain, torch.optim.AdamW(plain.parameters(), lr=2e-3, foreach=False), dtype, 100)
    model = resting(storage, dtype)
    optimizer = optimizer_of(model, via=via)
    assert losses(model, optimizer, dtype, 100) == want
    assert torch.equal(optimizer.masters["up.weight"], plain.up.weight)
    assert want[-1] < 0.8 * want[0]


@pytest.mark.parametrize("via", [None, torch.bfloat16])
@pytest.mark.parametrize("storage", STORAGES)
def test_from_masters_is_one_cast_of_each(storage: str, via: torch.dtype | None) -> None:
    model = resting(storage)
    masters = {
        name: torch.randn_like(p) for name, p in model.named_parameters() if "weight" in name
    }
    from_masters(model, masters, via=via)
    for name, master in masters.items():
        want = stowage.quantize(master if via is None else master.to(via), storage)
        weight: Any = model.get_parameter(name)
        for part, value in want.parts.items():
            assert torch.equal(weight.parts[part], value), (name, part)


def test_masters_start_as_the_init_bitwise_and_are_that_memory() -> None:
    torch.manual_seed(2)
    want = nn.Linear(24, 33)
    model = resting("f8_e4m3:tensor")
    kept = init_value(model.up.weight)
    optimizer = optimizer_of(model)
    master = optimizer.masters["up.weight"]
    assert torch.equal(master, want.weight.data) and master.data_ptr() == kept.data_ptr()
    assert optimizer.sources == {"up.weight": "kept", "down.weight": "kept"}
    other = optimizer_of(model)  # a second one gets memory of its own
    assert other.masters["up.weight"].data_ptr() != master.data_ptr()
    assert torch.equal(other.masters["up.weight"], want.weight.data)
    taken = take_init_value(model.up.weight)
    assert taken.data_ptr() != master.data_ptr() and torch.equal(taken, want.weight.data)


def test_the_first_step_releases_what_was_kept() -> None:
    model = resting("nf4", torch.bfloat16)
    dead = weakref.ref(init_value(model.up.weight))
    optimizer = optimizer_of(model)
    assert has_init_value(model.up.weight) and dead() is not None
    losses(model, optimizer, torch.bfloat16, 1)
    assert dead() is None
    with pytest.raises(ValueError, match="cleared at the first step of MasterOptimizer"):
        init_value(model.up.weight)


def test_masters_follow_what_is_loaded() -> None:
    """Before the optimizer is made, after it, and between two steps."""
    values = {name: torch.randn_like(p) for name, p in resting("int8").state_dict().items()}
    model = resting("int8")
    model.load_state_dict(values)
    first = optimizer_of(model)
    assert set(first.sources.values()) == {"resting"}
    late = resting("int8")
    second = optimizer_of(late)
    late.load_state_dict(values)
    assert losses(model, first, torch.float32, 5) == losses(late, second, torch.float32, 5)
    late.load_state_dict(model.state_dict())
    losses(late, second, torch.float32, 1)
    exact = resting("int8", preserve_init=False)
    with quantized_init("int8", preserve_init=True):
        exact.load_state_dict(values)
    assert torch.equal(optimizer_of(exact).masters["up.weight"], values["up.weight"])


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("model_first", [True, False])
def test_a_run_that_was_stopped_equals_one_that_was_not(rounding: Any, model_first: bool) -> None:
    whole = resting("f8_e4m3:row")
    want_optimizer = optimizer_of(whole, rounding=rounding)
    losses(whole, want_optimizer, torch.float32, 3)
    saved = copy.deepcopy((whole.state_dict(), want_optimizer.state_dict()))
    want = losses(whole, want_optimizer, torch.float32, 3)
    other = resting("f8_e4m3:row")
    optimizer = optimizer_of(other, rounding=rounding)
    for i in (0, 1) if model_first else (1, 0):
        (other, optimizer)[i].load_state_dict(saved[i])
    assert losses(other, optimizer, torch.float32, 3) == want
    assert torch.equal(optimizer.masters["up.weight"], want_optimizer.masters["up.weight"])


def test_moves_between_steps_leave_masters_alone() -> None:
    model = resting("f8_e4m3:tensor")
    optimizer = optimizer_of(model)
    losses(model, optimizer, torch.float32, 1)
    before = optimizer.masters["up.weight"].clone()
    model.half().float()
    model.zero_grad()
    optimizer.step()
    assert torch.equal(optimizer.masters["up.weight"], before)


def test_stochastic_rounding_is_seeded() -> None:
    runs = []
    for seed in (0, 0, 1):
        model = resting("f8_e4m3:tensor")
        runs.append(
            losses(model, optimizer_of(model, rounding="stochastic", seed=seed), torch.float32, 4)
        )
    assert runs[0] == runs[1] != runs[2]


def test_stock_tools_take_it() -> None:
    model = resting("f8_e4m3:tensor")
    groups = [
        {"params": [model.up.weight, model.up.bias], "lr": 0.1},
        {"params": [model.down.weight]},
    ]
    optimizer = MasterOptimizer(torch.optim.SGD, groups, lr=0.5, momentum=0.9)
    optimizer.add_param_group({"params": [model.down.bias], "lr": 0.2})
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    model(torch.ones(2, 24)).sum().backward()
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3) > 1e-3
    optimizer.step()
    assert optimizer.masters["0"].dtype == torch.float32 and model.up.weight.grad is not None
    optimizer.zero_grad()
    assert model.up.weight.grad is None
    schedule.step()
    assert [round(g["lr"], 6) for g in optimizer.param_groups] == [0.01, 0.05, 0.02]
    assert len(optimizer.masters) == 2 and isinstance(optimizer, torch.optim.Optimizer)


def test_weights_that_were_stowed_and_made_trainable() -> None:
    layer = nn.Linear(8, 8)
    stowage.stow(layer, "int8")
    layer.weight = nn.Parameter(layer.weight)
    optimizer = MasterOptimizer(torch.optim.SGD, layer, lr=0.1)
    before = layer.weight.dequantize()
    layer(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    assert optimizer.sources == {"weight": "resting"}
    assert torch.allclose(layer.weight.dequantize(), before - 0.2, atol=2e-2)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda m: optimizer_of(m, rounding="up"), "rounding must be one of"),
        (lambda m: from_masters(m, [torch.ones(3)]), "one master for each of 2 weights, got 1"),
        (lambda m: from_masters(m, {"x": torch.ones(3)}), r"of resting weights, got \['x'\]"),
        (lambda m: from_masters([m.up.bias], [torch.ones(33)]), "0 must rest, got Parameter"),
        (lambda m: from_masters([m.up.weight], [torch.ones(3)]), r"must be \[33, 24\], got \[3\]"),
        (lambda m: from_masters([m.up.weight], [torch.ones(9, dtype=torch.int32)]), "floating"),
        (lambda m: from_masters([m.up.weight], [torch.ones(9)], [1000]), "within 792 elements"),
        (
            lambda m: from_masters([m.up.weight], [torch.full((33, 24), torch.inf)]),
            "must be finite",
        ),
        (lambda m: optimizer_of(m).load_state_dict({}), "must have masters of"),
    ],
)
def test_refusals_change_nothing(call: Any, text: str) -> None:
    model = resting("f8_e4m3:tensor")
    before = model.up.weight.dequantize()
    with pytest.raises(ValueError, match=text):
        call(model)
    assert torch.equal(model.up.weight.dequantize(), before)


# --- 5: the master is first -----------------------------------------------------------------------


def test_master_first_inits_in_fp32_and_is_adopted() -> None:
    torch.manual_seed(2)
    want = nn.Linear(24, 33)
    model = resting("f8_e4m3:tensor", torch.bfloat16, preserve_init=False, master_first=True)
    master = init_value(model.up.weight)
    assert master.dtype == torch.float32 and torch.equal(master, want.weight.data)
    assert torch.equal(
        model.up.weight.dequantize(torch.float32),
        stowage.quantize(want.weight.data, "f8_e4m3:tensor").dequantize(),
    )
    assert optimizer_of(model).masters["up.weight"].data_ptr() == master.data_ptr()


# --- ranks ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sharded_training_equals_training_of_the_whole() -> None:
    cases = [("f8_e4m3:tensor", "nearest"), ("f8_e4m3:tensor", "stochastic")]
    assert on_ranks(2, sharded_equals_whole, cases, 20) == [2, 2]


@pytest.mark.nightly
@pytest.mark.parametrize("world", [1, 2, 4])
def test_sharded_training_of_every_storage(world: int) -> None:
    cases = [(storage, rounding) for storage in STORAGES for rounding in ("nearest", "stochastic")]
    on_ranks(world, sharded_equals_whole, cases, 100, seconds=300)


@pytest.mark.slow
def test_parts_of_flat_weights_need_one_reduction() -> None:
    storages = [
        "f8_e4m3:tensor",
        "f8_e4m3:row",
        "f8_e4m3:row2",
        "int8:block32",
        "bf16",
        "nf4",
        "nf4:nested",
        "nf4:nested",
    ]
    assert on_ranks(2, parts_of_flat_weights, storages * 2) == [1, 1]
    texts = on_ranks(2, refused_alike)
    assert (
        texts[0] == texts[1]
        and "the master of w must be finite, got inf or NaN on rank 1" in texts[0]
    )

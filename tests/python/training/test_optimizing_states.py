# SPDX-License-Identifier: Apache-2.0
"""Checkpoints, copies and pickles of MasterOptimizer, and whose values count after them."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_training import Mlp, checkpoints_by_name_on_ranks, losses, optimizer_of, resting
from lock_step import OPTIMIZERS, STORAGE, in_lock_step, pair
from ranks import on_ranks
from surroundings import Model, in_groups, plainly, scaled
from torch.distributed.checkpoint import state_dict as named

from stowage.training import MasterOptimizer, init_value, quantized_init


def through_states(states: list[Any], model: Model, optimizer: Any) -> None:
    optimizer.load_state_dict(states[1])
    model.load_state_dict(states[0])


def through_names(**options: Any) -> tuple[Any, Any]:
    given = named.StateDictOptions(**options)

    def save(model: Model, optimizer: Any) -> Any:
        return copy.deepcopy(named.get_state_dict(model, optimizer, options=given))

    def load(states: Any, model: Model, optimizer: Any) -> None:
        named.set_state_dict(
            model, optimizer, model_state_dict=states[0], optim_state_dict=states[1], options=given
        )

    return save, load


WAYS: dict[str, Any] = {
    "state_dict": (lambda m, o: copy.deepcopy([m.state_dict(), o.state_dict()]), through_states),
    "by name": through_names(),
    "by name, flat": through_names(flatten_optimizer_state_dict=True),
    "by name, whole, on the host": through_names(full_state_dict=True, cpu_offload=True),
}


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "several groups"])
def test_checkpoints_resume_in_lock_step(way: str, optimizer: str, steps: int) -> None:
    save, load = WAYS[way]
    first, second = pair(OPTIMIZERS[optimizer]), pair(OPTIMIZERS[optimizer])
    for (model, its), (other, fresh) in zip(first, second, strict=True):
        list(itertools.islice(plainly(model, its), steps))
        load(save(model, its), other, fresh)
        assert fresh.state[other.up.weight].keys() == its.state[model.up.weight].keys()
    in_lock_step(scaled(unscale=True), second)


def test_states_of_the_former_form_load() -> None:
    """Masters by name and the number of steps, beside the inner optimizer's state."""
    for rounding in ("nearest", "stochastic"):
        model = resting(STORAGE)
        optimizer = optimizer_of(model, rounding=rounding)
        losses(model, optimizer, torch.float32, 3)
        state = copy.deepcopy(optimizer.state_dict())
        former = {"param_groups": state["param_groups"], "steps": 3}
        former["masters"] = {k: v.clone() for k, v in optimizer.masters.items()}
        former["state"] = {
            key: {k: v for k, v in values.items() if k not in ("master", "casts")}
            for key, values in state["state"].items()
        }
        other = resting(STORAGE)
        fresh = optimizer_of(other, rounding=rounding)
        fresh.load_state_dict(former)
        other.load_state_dict(model.state_dict())
        want = losses(model, optimizer, torch.float32, 3)
        assert losses(other, fresh, torch.float32, 3) == want


def test_moments_of_16_bit_models_stay_fp32() -> None:
    model = resting(STORAGE, torch.bfloat16)
    optimizer = optimizer_of(model)
    losses(model, optimizer, torch.bfloat16, 2)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = resting(STORAGE, torch.bfloat16)
    fresh = optimizer_of(other)
    fresh.load_state_dict(torch.load(file))
    for name in ("exp_avg", "exp_avg_sq", "master"):
        got, want = (o.state[m.up.weight][name] for o, m in ((fresh, other), (optimizer, model)))
        assert got.dtype == torch.float32 and torch.equal(got, want)


def test_masters_count_until_the_next_step_only() -> None:
    model = resting(STORAGE)
    optimizer = optimizer_of(model)
    losses(model, optimizer, torch.float32, 2)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    losses(model, optimizer, torch.float32, 1)
    with torch.no_grad():
        model.up.weight.fill_(0.5)
    optimizer.zero_grad()
    optimizer.step()  # follows what was written: the masters count no longer
    assert torch.equal(optimizer.masters["up.weight"], torch.full((33, 24), 0.5))
    assert optimizer.sources["up.weight"] == "resting"


@pytest.mark.parametrize("how", ["state_dict", "deepcopy", "pickle"])
def test_what_is_kept_after_a_write_is_of_its_values(how: str) -> None:
    model = resting("int8:row")
    optimizer = optimizer_of(model)
    losses(model, optimizer, torch.float32, 2)
    model.load_state_dict(Mlp().state_dict())
    written = model.up.weight.dequantize()
    if how == "state_dict":
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    elif how == "deepcopy":
        model, optimizer = copy.deepcopy((model, optimizer))
    else:
        model, optimizer = pickle.loads(pickle.dumps((model, optimizer)))
    losses(model, optimizer, torch.float32, 1)
    assert (model.up.weight.dequantize() - written).abs().max() < 0.02  # of former values: 0.4


def test_a_state_given_back_as_it_is_changes_nothing() -> None:
    """As accelerate does when it takes an optimizer; what is loaded into the model then counts."""
    model = resting(STORAGE)
    kept = init_value(model.up.weight)
    optimizer = optimizer_of(model)
    optimizer.load_state_dict(optimizer.state_dict())
    assert not optimizer.state and init_value(model.up.weight) is kept
    model.load_state_dict({name: torch.ones_like(p) for name, p in model.state_dict().items()})
    optimizer.step()
    assert torch.equal(optimizer.masters["up.weight"], torch.ones(33, 24))


def test_filling_the_state_moves_nothing() -> None:
    model = resting(STORAGE)
    optimizer = optimizer_of(model, weight_decay=0.5)
    before = copy.deepcopy((optimizer.masters, model.up.bias.detach(), model.state_dict()))
    optimizer.fill_state()
    after = optimizer.masters, model.up.bias.detach(), model.state_dict()
    for a, b in zip((*before[0].values(), before[1]), (*after[0].values(), after[1]), strict=True):
        assert torch.equal(a, b)
    assert optimizer.param_groups[0]["lr"] == 2e-3 and model.up.weight.grad is None
    assert optimizer.state[model.up.weight]["exp_avg"].abs().max() == 0


def test_stochastic_rounding_draws_anew_at_each_step() -> None:
    """A master that does not move is rounded to both of its neighbours in the end."""
    model = resting(STORAGE)
    optimizer = MasterOptimizer(torch.optim.SGD, model, rounding="stochastic", lr=0.0)
    seen = []
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        seen.append(model.up.weight.parts["codes"].clone())
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])


@pytest.mark.parametrize("again", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_copies_of_model_and_optimizer_train_alike(again: Any) -> None:
    model = resting(STORAGE)
    optimizer = optimizer_of(model)
    losses(model, optimizer, torch.float32, 2)
    other, its = again((model, optimizer))
    want = losses(model, optimizer, torch.float32, 3)
    assert losses(other, its, torch.float32, 3) == want
    assert torch.equal(its.masters["up.weight"], optimizer.masters["up.weight"])


def test_frozen_weights_that_rest_are_left_out() -> None:
    with quantized_init("int8"):
        model = Mlp()
    model.down.weight.requires_grad_(False)
    optimizer = optimizer_of(model)
    assert [p is q for p, q in zip(in_groups(optimizer), [*model.up.parameters()], strict=False)]
    assert model.down.weight not in set(in_groups(optimizer)) and len(in_groups(optimizer)) == 3
    losses(model, optimizer, torch.float32, 1)


@pytest.mark.slow
def test_sharded_checkpoints_by_name(tmp_path: Path) -> None:
    assert on_ranks(2, checkpoints_by_name_on_ranks, STORAGE, str(tmp_path)) == ["alike"] * 2

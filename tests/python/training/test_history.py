# SPDX-License-Identifier: Apache-2.0
"""Delayed scaling defined again in plain Python: which amax counts, and which are left out."""

import itertools
import math
import struct
from typing import Any

import pytest
import torch
from torch import nn

from stowage.training import history
from stowage.training.recipes import recipe_of

STEPS = [3.0, 0.0, 7.5, math.inf, 0.25, -1.0, math.nan, 2.0, 2.0**-70, 0.0, 0.0, 0.0, 5.0]
LARGEST = (448.0, 448.0, 57344.0)  # of input, weight and gradient


def fp32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def scale(amax: float, role: int, mode: str, margin: int, pow2: bool) -> float:
    found = fp32(LARGEST[role] / (max(amax, 1e-12) if mode == "torchao" else amax)) / 2**margin
    return 2.0 ** math.floor(math.log2(found)) if pow2 else found


class Reference:
    """Scales of one role, step by step."""

    def __init__(self, role: int, facts: Any) -> None:
        self.role, self.facts, self.past, self.scale = role, facts, [0.0] * 3, 0.0

    def roll(self, rule: str, amax: float) -> float:
        if amax != -1:  # nothing was seen
            self.past = [amax, *self.past[:-1]]
            several = math.nan if any(map(math.isnan, self.past)) else max(self.past)
            top = several if rule == "max" else amax
            if math.isfinite(top) and top > 0:
                self.scale = scale(top, self.role, *self.facts)
        return self.scale


@pytest.mark.parametrize("rule", ["max", "most_recent"])
@pytest.mark.parametrize("mode", ["torchao", "te"])
def test_scales_are_those_of_the_finite_amaxes(mode: str, rule: Any) -> None:
    for margin, pow2 in itertools.product((0, 3), (False, True)):
        changes = {"scale_mode": mode, "margin": margin, "pow2": pow2, "rule": rule}
        recipe = recipe_of("delayed", {**changes, "history_length": 3})
        module = nn.Linear(2, 2)
        history.attach(module, recipe, torch.device("cpu"))
        want = [Reference(role, (mode, margin, pow2)) for role in range(3)]
        for at in range(len(STEPS)):
            amax = [STEPS[(at + shift) % len(STEPS)] for shift in range(3)]
            got = history.roll([module], torch.tensor([amax]), recipe)[0].tolist()
            assert got == [w.roll(rule, a) for w, a in zip(want, amax, strict=True)], (at, changes)


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("margin", [0, 1, 4])
@pytest.mark.parametrize("role", [history.INPUT, history.WEIGHT, history.GRADIENT])
def test_the_first_step_has_a_scale_of_its_own_data_and_its_margin(
    role: int, margin: int, pow2: bool
) -> None:
    recipe = recipe_of("delayed", {"margin": margin, "pow2": pow2})
    module = nn.Linear(2, 2)
    history.attach(module, recipe, torch.device("cpu"))
    first = history.scale_for(module, role, torch.tensor(6.5), recipe)
    assert first.item() == scale(6.5, role, recipe.scale_mode, margin, pow2)
    for past in (2.0, 1e6):  # scales above 1 and below
        history.roll([module], torch.full((1, 3), past), recipe)
        later = history.scale_for(module, role, torch.tensor(6.5), recipe)
        assert later.item() == scale(past, role, recipe.scale_mode, margin, pow2)


def test_a_step_without_data_leaves_an_empty_history_as_it_is() -> None:
    recipe = recipe_of("delayed", {"rule": "max"})
    module, used = nn.Linear(2, 2), nn.Linear(2, 2)
    for each in (module, used):
        history.attach(each, recipe, torch.device("cpu"))
    empty = module.get_buffer(history.BUFFER).clone()
    for amax in (3.0, 2.0):
        for role in (history.INPUT, history.WEIGHT, history.GRADIENT):
            history.see(used, role, torch.tensor(amax + role))
    assert history.seen([module, used]).tolist() == [[-1.0] * 3, [3.0, 4.0, 5.0]]
    history.roll([used], history.seen([used]), recipe)
    assert history.seen([used]).tolist() == [[-1.0] * 3]
    history.reset_history(nn.Sequential(used, nn.ReLU()))
    for each in (module, used):
        assert torch.equal(each.get_buffer(history.BUFFER), empty)
        scales = history.roll([each], history.seen([each]), recipe)
        assert scales.tolist() == [[0.0] * 3]
        assert torch.equal(each.get_buffer(history.BUFFER), empty)


def test_a_history_is_of_fp32_and_on_the_device_whatever_the_default_is() -> None:
    recipe, module = recipe_of("delayed", {"history_length": 4}), nn.Linear(2, 2)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        history.attach(module, recipe, torch.device("meta"))
    finally:
        torch.set_default_dtype(before)
    state = module.get_buffer(history.BUFFER)
    assert (state.dtype, state.shape) == (torch.int32, (3, 2 + 4)) and state.is_meta

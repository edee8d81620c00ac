# SPDX-License-Identifier: Apache-2.0
"""Kept init values have one owner and one end, and are counted."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_models import Net, made, one, plain
from torch import nn

import stowage
from stowage.training import (
    clear_init_value,
    has_init_value,
    init_value,
    init_values,
    quantized_init,
    take_init_value,
)


def test_get_repeats_and_take_moves_out_once() -> None:
    layer = one()
    value = init_value(layer.weight)
    assert init_value(layer.weight) is value
    assert take_init_value(layer.weight) is value
    for again in (take_init_value, init_value):
        with pytest.raises(
            ValueError, match=r"it was taken: take_init_value\(\) moves it out once"
        ):
            again(layer.weight)
    assert not has_init_value(layer.weight)


@pytest.mark.parametrize("end", [clear_init_value, take_init_value])
def test_clear_and_take_really_free(end: Callable[[Any], Any]) -> None:
    layer = one()
    dead = weakref.ref(init_value(layer.weight))
    assert dead() is not None  # it is alive as long as the weight keeps it
    end(layer.weight)
    assert dead() is None
    clear_init_value(layer.weight)  # twice is once


def test_what_was_not_kept_says_so() -> None:
    layer = made(preserve_init=False).up
    with pytest.raises(ValueError, match="none was kept: make the model in quantized_init"):
        init_value(layer.weight)
    with pytest.raises(ValueError, match="must have been made inside quantized_init"):
        init_value(stowage.quantize(torch.ones(4, 4), "int8"))


def test_until_first_forward_ends_each_module_at_its_own() -> None:
    model = made(until="first_forward")
    dead = weakref.ref(init_value(model.up.weight))
    copied = copy.deepcopy(model)
    pickle.loads(pickle.dumps(model))
    model(torch.arange(4))
    assert dead() is None
    with pytest.raises(ValueError, match="cleared at the first forward"):
        init_value(model.up.weight)
    assert not model.up._forward_pre_hooks
    assert has_init_value(model.conv.weight) and has_init_value(copied.up.weight)
    copied(torch.arange(4))
    assert not has_init_value(copied.up.weight)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"until": "later"}, "until must be one of"),
        ({"preserve_init": False, "budget": 5}, "must come with preserve_init=True"),
        ({"spill_budget": 5}, "must come with spill=folder"),
        ({"master_first": True, "spill": "x"}, "without spill"),
        ({"budget": "many"}, "budget"),
    ],
)
def test_refused_arguments(options: dict[str, Any], text: str) -> None:
    with (
        pytest.raises(ValueError, match=text),
        quantized_init("int8", **{"preserve_init": True, **options}),
    ):
        pass


# --- counted ----


def kept_bytes(model: nn.Module) -> int:
    return sum(value.nbytes for value in init_values(model))


def plain_bytes() -> int:
    every = dict(plain().named_parameters())
    return sum(p.nbytes for n, p in every.items() if n.endswith("weight"))


def test_nothing_with_the_option_off_and_one_copy_with_it_on() -> None:
    assert kept_bytes(made(preserve_init=False)) == 0
    model = made()
    assert kept_bytes(model) == plain_bytes()
    places = {init_value(p).data_ptr() for n, p in model.named_parameters() if "weight" in n}
    assert len(places) == 4


def test_del_of_the_model_frees_all() -> None:
    model = made()
    dead = [weakref.ref(init_value(p)) for n, p in model.named_parameters() if "weight" in n]
    assert all(ref() is not None for ref in dead)
    del model
    gc.collect()
    assert [ref() for ref in dead] == [None] * 4


def test_an_exception_inside_frees_all() -> None:
    model = None
    with pytest.raises(KeyError), quantized_init("nf4", preserve_init=True):
        model = Net()
        dead = [weakref.ref(init_value(p)) for n, p in model.named_parameters() if "weight" in n]
        raise KeyError
    assert [ref() for ref in dead] == [None] * 4
    with pytest.raises(ValueError, match="cleared when an exception ended quantized_init"):
        init_value(model.up.weight)


def test_a_budget_refuses_before_anything_is_kept() -> None:
    most = plain_bytes() + 40 * 32 * 4  # the head's own weight, until it is tied
    made(budget=most)
    with pytest.raises(
        ValueError, match=r"budget must have room for \d+ more bytes.*or give spill="
    ):
        made(budget=most - 1)


def test_spilling_puts_all_or_the_rest_on_disk(tmp_path: Path) -> None:
    want = plain()
    model = made(spill=tmp_path)
    assert {value.place for value in init_values(model)} == {"disk"}
    assert len(list(tmp_path.iterdir())) == 4
    for (name, p), (_, q) in zip(model.named_parameters(), want.named_parameters(), strict=True):
        if "weight" in name:
            assert torch.equal(init_value(p), q.data)
    clear_init_value(model.up.weight)
    assert len(list(tmp_path.iterdir())) == 3
    del p, model
    gc.collect()
    assert not list(tmp_path.iterdir())
    some = made(spill=tmp_path, budget=6000)
    assert [value.place for value in init_values(some)] == ["ram", "disk", "disk", "disk"]
    with pytest.raises(ValueError, match="spill_budget must have room"):
        made(spill=tmp_path, spill_budget=6000)
    gc.collect()
    assert len(list(tmp_path.iterdir())) == 3


def test_a_deep_copy_of_a_spilled_value_and_its_reinit(tmp_path: Path) -> None:
    layer = one(spill=tmp_path)
    other = copy.deepcopy(layer)
    want = init_value(layer.weight)
    clear_init_value(layer.weight)
    assert torch.equal(init_value(other.weight), want)
    with quantized_init("f8_e4m3:tensor", preserve_init=True, spill=tmp_path):
        other.reset_parameters()
    assert init_values(other)[0].place == "disk" and not torch.equal(init_value(other.weight), want)

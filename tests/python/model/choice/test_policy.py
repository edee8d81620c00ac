# SPDX-License-Identifier: Apache-2.0
"""One object says how weights rest and work, and every door takes it."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from same_weights import same
from torch import nn

import stowage
from stowage.integrations.fabric import StowagePrecision
from stowage.integrations.transformers import StowageConfig
from stowage.training import quantized_init

POLICY = stowage.Policy("nf4", rules={"2.*": "int8:row", "4": None}, exact=True)
RESTS = {"0.weight": "nf4:block64", "2.weight": "int8:row"}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)
    )


def resting(model: nn.Module) -> dict[str, str]:
    return {
        name: p.resting
        for name, p in model.named_parameters()
        if isinstance(p, stowage.StowedTensor)
    }


def test_stow_does_what_its_own_arguments_would() -> None:
    one, two, x = net(), net(), torch.randn(3, 64)
    stowage.stow(one, POLICY)
    stowage.stow(two, "nf4", rules={"2.*": "int8:row", "4": None}, exact=True)
    assert resting(one) == resting(two) == RESTS
    assert torch.equal(one(x), two(x))


def test_load_takes_it(tmp_path: Path) -> None:
    stowage.save(net(), tmp_path)
    loaded, stowed, x = stowage.load(net(), tmp_path, POLICY), net(), torch.randn(3, 64)
    stowage.stow(stowed, POLICY)
    assert resting(loaded) == RESTS
    assert torch.equal(loaded(x), stowed(x))
    works = stowage.Policy(compute_dtype=torch.bfloat16)  # nothing is to rest
    assert stowage.load(net(), tmp_path, works)[0].weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"budget": "1MiB"}, "got budget"),
        ({"buffers": True, "max_error": 0.1}, "max_error, buffers"),
    ],
)
def test_load_names_what_it_cannot_do(more: dict[str, Any], told: str, tmp_path: Path) -> None:
    stowage.save(net(), tmp_path)
    with pytest.raises(stowage.InvalidArgument, match=rf"stowage.load: a policy .*{told}"):
        stowage.load(net(), tmp_path, dataclasses.replace(POLICY, **more))


def test_transformers_configuration_takes_it() -> None:
    policy = dataclasses.replace(POLICY, working="layer")
    told = StowageConfig(policy).to_dict()
    assert told == {**policy.to_dict(), "quant_method": "stowage"}
    assert StowageConfig(**told).policy == StowageConfig(policy).policy
    with pytest.raises(stowage.InvalidArgument, match="compute_dtype must be given to from_pr"):
        StowageConfig(stowage.Policy("nf4", compute_dtype=torch.float16))
    with pytest.raises(stowage.InvalidArgument, match="rules must be globs"):
        StowageConfig(stowage.Policy(rules={nn.Linear: "nf4"}))


def test_fabric_takes_it() -> None:
    plain = StowagePrecision(POLICY)
    assert plain.dtype == torch.bfloat16
    model = plain.convert_module(net())
    assert resting(model) == RESTS and model[4].weight.dtype == torch.bfloat16
    half = StowagePrecision(stowage.Policy("int8", compute_dtype=torch.float16))
    assert half.convert_module(net())[0].weight.dtype == torch.float16


def test_quantized_init_takes_a_storage_and_exact() -> None:
    with quantized_init(stowage.Policy("int8", exact=True)):
        layer, dense = nn.Linear(64, 64), copy.deepcopy
    x = torch.randn(2, 64)
    assert resting(layer) == {"weight": "int8:row"}
    plain = dense(layer.weight.detach().dequantize())
    assert torch.equal(layer(x), nn.functional.linear(x, plain, layer.bias))
    for policy, told in (
        (POLICY, "got rules"),
        (stowage.Policy(["int8", "nf4"]), "storage must be one"),
        (stowage.Policy(exact=True), "storage must be one, got None"),
    ):
        with pytest.raises(stowage.InvalidArgument, match=told), quantized_init(policy):
            pass


def test_plan_takes_its_storage(tmp_path: Path) -> None:
    stowage.save(net(), tmp_path)
    links = stowage.measured_links()
    policy = stowage.Policy("nf4")
    wanted = stowage.plan(tmp_path, ram="1MiB", storage="nf4", links=links)
    assert str(stowage.plan(tmp_path, ram="1MiB", storage=policy, links=links)) == str(wanted)
    with pytest.raises(stowage.InvalidArgument, match=r"plan: a policy .*got rules, exact"):
        stowage.plan(tmp_path, ram="1MiB", storage=POLICY, links=links)


def test_stow_must_be_told_something() -> None:
    for said in ((), (None,), (stowage.Policy(),)):
        with pytest.raises(stowage.InvalidArgument, match="a storage, rules or a policy must be"):
            stowage.stow(net(), *said)
    assert not stowage.stow(net(), compute_dtype=torch.bfloat16).stowed


def test_it_comes_alone() -> None:
    with pytest.raises(stowage.InvalidArgument, match="must come alone, got it with skip, measure"):
        stowage.stow(net(), POLICY, skip="language", measure=False)
    model = net()
    stowage.stow(model, POLICY, keep_master="ram", restow=True)  # of this call, not of the policy
    assert resting(model) == RESTS


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"storage": "nf5"}, "nf5"),
        ({"rules": [("0.*", "nf4")]}, "rules must be a mapping of patterns"),
        ({"on_exceed": "weep"}, "on_exceed"),
        ({"working": "block"}, "blocks must be given"),
        ({"exact": True, "working": "tile"}, "exact=True needs"),
        ({"compute_dtype": torch.int8}, "compute_dtype"),
        ({"budget": "1 parsec"}, "parsec"),
        ({"calibrate": [1]}, "calibrate must come"),
    ],
)
def test_what_is_none_is_refused_when_it_is_made(said: dict[str, Any], told: str) -> None:
    with pytest.raises(stowage.InvalidArgument, match=re.escape(told)):
        stowage.Policy(**said)


def test_it_goes_through_json() -> None:
    policy = stowage.Policy(
        ["nf4", "int8", None],
        rules={"b*": "f8_e4m3", "a*": ["int8", None]},
        skip=["*norm*", "language"],
        allow_unmatched=True,
        max_error=0.1,
        on_exceed="raise",
        budget="2GiB",
        compute_dtype=torch.bfloat16,
        keep_nonfinite=True,
        measure=False,
        buffers=True,
        working="block",
        blocks=["*.layers.?"],
        input_cast={"*": "compute"},
    )
    told = json.loads(json.dumps(policy.to_dict()))
    assert list(told["rules"]) == ["b*", "a*"]  # the first match decides
    assert stowage.Policy.from_dict(told) == policy
    assert stowage.Policy.from_dict({}) == stowage.Policy() and stowage.Policy().to_dict() == {}
    with pytest.raises(stowage.InvalidArgument, match=r"got 'storge'; storage\?"):
        stowage.Policy.from_dict({"storge": "nf4"})
    with pytest.raises(stowage.InvalidArgument, match="calibrate must be what JSON can hold"):
        stowage.Policy("nf4", max_error=0.1, calibrate=[torch.ones(1)]).to_dict()


def test_a_caller_may_change_its_own_collections() -> None:
    rules, skip = {"0.*": ["int8", "nf4"]}, ["4.*"]
    policy = stowage.Policy(rules=rules, skip=skip, budget="1MiB")
    told = policy.to_dict()
    rules.clear()
    skip.append("0.*")
    model = net()
    stowage.stow(model, policy)
    assert resting(model) == {"0.weight": "int8:row"} and policy.to_dict() == told


def test_what_can_be_read_once_is_read_once() -> None:
    """A policy is used often, and made into others."""
    samples = (torch.randn(2, 64) for _ in range(3))
    skips = (f"{i}.*" for i in (0, 4))
    policy = stowage.Policy("nf4", skip=skips, max_error=1.0, calibrate=samples)
    for one in (policy, policy, dataclasses.replace(policy, exact=True)):
        model = net()
        stowage.stow(model, one)
        assert resting(model) == {"2.weight": "nf4:block64"}


def test_pickles_hold_what_was_said_alone() -> None:
    for one in (POLICY, stowage.Policy(), dataclasses.replace(POLICY, skip={"4.*"})):
        told = pickle.dumps(one)
        assert pickle.loads(told) == copy.deepcopy(one) == one and b"_model" not in told
    model = net()
    stowage.stow(model, pickle.loads(pickle.dumps(POLICY)))
    assert resting(model) == RESTS
    told = pickle.dumps(StowageConfig(POLICY))
    assert pickle.loads(told).to_dict() == StowageConfig(POLICY).to_dict()
    assert b"_model" not in told


def test_any_arguments_mean_the_same_in_a_policy() -> None:
    draw = random.Random(7)
    storages: Any = ["nf4", "int8", "f8_e4m3:row", ["int8", "nf4"], ["nf4", None], None]
    for _ in range(60):
        said: dict[str, Any] = {
            "rules": {f"{i}.*": draw.choice(storages) for i in draw.sample([0, 2, 4], 2)},
            "skip": draw.choice([None, [], ["2.*"], "language"]),
            "max_error": draw.choice([None, 0.05]),
            "compute_dtype": draw.choice([None, torch.bfloat16]),
            "working": draw.choice([None, "layer"]),
            "keep_nonfinite": draw.random() < 0.5,
        }
        storage, one, two = draw.choice(storages), net(), net()
        said = {name: value for name, value in said.items() if draw.random() < 0.7}
        said["budget"] = "1MiB"  # which lists of storages need
        policy = stowage.Policy(storage, **said)
        mine, theirs = stowage.stow(one, policy).rows, stowage.stow(two, storage, **said).rows
        assert mine == theirs and same(one, two), (storage, said)
        told = json.loads(json.dumps(policy.to_dict()))
        assert stowage.Policy.from_dict(told) == policy

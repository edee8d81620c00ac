# SPDX-License-Identifier: Apache-2.0
"""Device maps: accelerate's where accelerate is right, and valid for every model."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from dispatched import Block, Rooted, Small, random_model
from torch import nn

import stowage
from stowage.compat.accelerate.utils import modeling as ours


def _limits(rng: random.Random, total: int) -> dict[Any, int]:
    limits: dict[Any, int] = {i: rng.randint(0, max(total, 1)) for i in range(rng.randint(0, 3))}
    if not limits or rng.random() < 0.8:
        limits["cpu"] = rng.randint(0, max(total, 1))
    return limits


def _options(rng: random.Random) -> dict[str, Any]:
    return {
        "no_split_module_classes": rng.choice([None, ["Block"], "Block", ["Sequential"]]),
        "fallback_allocation": rng.random() < 0.4,
        "offload_buffers": rng.random() < 0.5,
        "clean_result": rng.random() < 0.5,
        "dtype": rng.choice([None, "float16"]),
    }


def _check(model: nn.Module, found: dict[str, Any], limits: dict[Any, int], dtype: Any) -> None:
    """Every tensor has a device, ties have one, and no limit is passed."""
    ours.check_device_map(model, found)
    sizes, used = ours.compute_module_sizes(model, dtype), Counter[Any]()
    for name, device in found.items():
        used[device] += sizes[name]
    assert sum(used.values()) == sizes[""], found
    assert all(used[device] <= limit for device, limit in limits.items()), (found, limits)
    for group in ours.find_tied_parameters(model):
        at = {d for name in group for key, d in found.items() if f"{name}.".startswith(f"{key}.")}
        assert len(at) == 1 or "" in found


@pytest.mark.parametrize("ties", [0, 3])
def test_random_models_beside_accelerate(ties: int) -> None:
    peer = pytest.importorskip("accelerate.utils.modeling")
    outcomes = Counter[str]()
    for seed in range(300):
        rng = random.Random(seed)
        model = random_model(seed, ties)
        limits = _limits(rng, ours.compute_module_sizes(model)[""])
        how = _options(rng)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = ours.infer_auto_device_map(model, limits, **how)
            _check(model, found, limits, how["dtype"])
            try:
                theirs = peer.infer_auto_device_map(model, dict(limits), **how)
            except IndexError:  # of ties
                outcomes["raises"] += 1
                continue
            outcomes["same" if dict(theirs) == dict(found) else "differs"] += 1
            balanced = peer.get_balanced_memory(model, dict(limits))
            assert balanced == ours.get_balanced_memory(model, limits)
            assert dict(peer.compute_module_sizes(model)) == ours.compute_module_sizes(model)
            groups = [sorted(group) for group in ours.find_tied_parameters(model)]
            assert sorted(groups) == sorted(map(sorted, peer.find_tied_parameters(model)))
            outcomes["tied"] += bool(groups)
    if not ties:
        assert outcomes == {"same": 300, "tied": 0}
        return
    assert outcomes["differs"] <= 2, "of ties alone, where both maps keep the limits"
    assert outcomes["raises"] > 0 and outcomes["tied"] > 100


def test_limits_are_filled_in_order_with_room_for_the_largest_layer() -> None:
    assert ours.infer_auto_device_map(Small(), {0: 200, 1: 200}) == {
        "linear1": 0, "norm": 1, "linear2": 1,
    }  # fmt: skip
    assert ours.infer_auto_device_map(Small(), {0: 400, 1: 500}) == {"": 0}
    assert ours.infer_auto_device_map(Small(), {"cpu": 0}) == {"": "disk"}


def test_fallback_finds_a_part_that_fits() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(2, 2), nn.Linear(8, 8))
    limits = {0: 330, "cpu": 10**6}
    without = ours.infer_auto_device_map(model, limits)
    assert 0 not in without.values()
    assert ours.infer_auto_device_map(model, limits, fallback_allocation=True)["1"] == 0


def test_direct_buffers_of_a_split_block_have_a_device() -> None:
    """accelerate forgets them, and then refuses its own map."""
    model = nn.Sequential(Block(8, buffer=True), Block(8, buffer=True))
    limits = {0: 700, "cpu": 4000}
    found = ours.infer_auto_device_map(model, limits, clean_result=False)
    assert "0.mask" in found
    _check(model, found, limits, None)
    peer = pytest.importorskip("accelerate.utils.modeling")
    with pytest.raises(ValueError, match="mask"):
        peer.check_device_map(model, peer.infer_auto_device_map(model, limits, clean_result=False))


def test_ties_of_ties_come_along() -> None:
    model = nn.Sequential(Block(4), Block(4), Block(4))
    model[1].first.weight = model[0].first.weight
    model[2].second.weight = model[1].second.weight
    limits = {0: 10**4, "cpu": 10**4}
    found = ours.infer_auto_device_map(model, limits)
    assert found == {"": 0}
    root = nn.Linear(4, 4)
    root.inner = nn.Linear(4, 4)
    root.inner.weight = root.weight  # a parameter of the root, tied: accelerate raises IndexError
    _check(root, ours.infer_auto_device_map(root, {0: 100, "cpu": 500}), {0: 100}, None)


def test_resting_weights_count_as_they_rest() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    stowage.stow(model, "int8")
    size = stowage.nbytes(model[0].weight)
    assert ours.compute_module_sizes(model)["0.weight"] == size < 64 * 64 * 2
    assert ours.compute_module_sizes(model, torch.float16)["0.weight"] == size
    assert ours.infer_auto_device_map(model, {0: 2 * size, "cpu": 10**6}) == {"": 0}


def test_special_dtypes_name_single_tensors() -> None:
    sizes = ours.compute_module_sizes(Small(), "float16", {"linear1.weight": torch.float32})
    assert sizes["linear1"] == 3 * 4 * 4 + 4 * 2
    assert sizes["norm.num_batches_tracked"] == 8
    assert ours.compute_module_total_buffer_size(Small(), torch.float16) == 2 * 4 * 2 + 8


def test_buffers_that_fit_no_accelerator_are_warned_of() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(64))
    with pytest.warns(UserWarning, match="offload_buffers=True"):
        ours.infer_auto_device_map(model, {0: 30, "cpu": 10**6})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours.infer_auto_device_map(model, {0: 30, "cpu": 10**6}, offload_buffers=True)


def test_maps_are_merged() -> None:
    given = {"a.b.c": 0, "a.b.d": 0, "a.e": 0, "f.g": 1, "f.h": "cpu"}
    assert ours.clean_device_map(dict(given)) == {"a": 0, "f.g": 1, "f.h": "cpu"}
    assert ours.clean_device_map({"a": 0, "b.c": 0}) == {"": 0}
    assert ours.clean_device_map({"a.1": 0, "a.10": 1}) == {"a.1": 0, "a.10": 1}


def test_maps_are_checked() -> None:
    model = Rooted(8)
    with pytest.raises(ValueError, match=r"scale, shift.*head\.weight"):
        ours.check_device_map(model, {"embed": 0, "blocks": 1})
    with pytest.warns(UserWarning, match="blocks.9"):
        ours.check_device_map(model, {"": 0, "blocks.9": 1})


def test_balance_numbers() -> None:
    assert ours.get_balanced_memory(Small(), {0: 200, 1: 200}) == {0: 200, 1: 200}
    assert ours.get_balanced_memory(Small(), {0: 300, 1: 300}) == {0: 215, 1: 300}
    assert ours.get_balanced_memory(Small(), {0: 300, 1: 500}, low_zero=True) == {0: 0, 1: 500}
    whole = ours.get_balanced_memory(Small(), {0: 300, 1: 300}, {"Linear"})
    assert whole[1] == 300
    given = {0: "1KB", "cpu": "1MiB"}
    assert ours.get_max_memory(given) == {0: 1000, "cpu": 2**20}
    assert given == {0: "1KB", "cpu": "1MiB"}  # accelerate writes numbers into it
    assert ours.get_max_memory()["cpu"] > 0
    with pytest.raises(ValueError, match="cuda:7"):
        ours.get_max_memory({"cuda:7": 5})

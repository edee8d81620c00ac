# SPDX-License-Identifier: Apache-2.0
"""Tools of torch that take a model apart or keep it: averages, swaps, exports, checkpoints."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch_checkpoints as lives
from ranks import on_ranks
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch_checkpoints import X, net

import stowage

STORAGES = ["int8:row", "nf4", "f8_e4m3:tensor"]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("ema", [False, True])
def test_averages_of_a_model_rest_as_it_does(storage: str, ema: bool) -> None:
    model = net(storage)
    given = {"multi_avg_fn": get_ema_multi_avg_fn(0.5)} if ema else {}
    average = AveragedModel(model, **given)
    average.update_parameters(model)
    before = model[0].bias.detach().clone()
    with torch.no_grad():
        model[0].bias.add_(1)
    average.update_parameters(model)
    assert type(average.module[0].weight) is stowage.StowedTensor
    assert torch.equal(average.module[0].weight.dequantize(), model[0].weight.dequantize())
    assert torch.allclose(average.module[0].bias, before + 0.5)


def test_weights_swap_with_their_storages() -> None:
    one, other = net("int8:row"), net("nf4", 0.5)
    expected = other(X)
    torch.utils.swap_tensors(one[0].weight, other[0].weight)
    torch.utils.swap_tensors(one[2].weight, other[2].weight)
    assert one[0].weight.resting == "nf4:block64" and other[0].weight.resting == "int8:row"
    with torch.no_grad():
        for mine, theirs in ((one[0].bias, other[0].bias), (one[2].bias, other[2].bias)):
            mine.copy_(theirs)
    assert torch.equal(one(X), expected)


def test_conversions_by_swapping_keep_the_storage() -> None:
    model = net("int8:row")
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to(torch.bfloat16)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert model[0].weight.resting == "int8:row" and model[0].weight.dtype == torch.bfloat16


@pytest.mark.parametrize("storage", STORAGES)
def test_exported_programs_hold_what_rests(tmp_path: Path, storage: str) -> None:
    model = net(storage)
    torch.export.save(torch.export.export(model, (X,)), tmp_path / "model.pt2")
    assert torch.equal(torch.export.load(tmp_path / "model.pt2").module()(X), model(X))
    assert (tmp_path / "model.pt2").stat().st_size < 50_000  # 65,536 bytes of weights, plain


@pytest.mark.slow
def test_packages_of_inductor_run(tmp_path: Path) -> None:
    model = net("int8:row")
    exported = torch.export.export(model, (X,))
    path = torch._inductor.aoti_compile_and_package(
        exported, package_path=str(tmp_path / "model.pt2")
    )
    assert torch.allclose(torch._inductor.aoti_load_package(path)(X), model(X), atol=1e-5)


def test_profiles_name_our_operators() -> None:
    model = net("int8:row")
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu) as profile:
        model(X)
    assert "stowage::linear" in {event.key for event in profile.key_averages()}


def test_profiles_tell_the_bytes_of_our_operators() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
        stowage.stow(model, "int8:row")
        made = model[0].weight.dequantize().nbytes
    taken = {event.key: event.self_cpu_memory_usage for event in profile.key_averages()}
    parts = [part for i in (0, 2) for part in model[i].weight.parts.values()]
    assert taken["stowage::quantize"] == sum(part.nbytes for part in parts)
    assert taken["stowage::dequantize"] == made


def test_hooks_of_state_dicts_see_weights() -> None:
    seen: dict[str, type] = {}

    def hook(module: nn.Module, state: dict[str, torch.Tensor], *_: object) -> None:
        seen.update({name: type(value) for name, value in state.items()})

    model = net("int8:row")
    model.register_state_dict_post_hook(hook)
    other = net("nf4", 0.5)
    other.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    assert seen["0.weight"] is stowage.StowedTensor and seen["0.bias"] is torch.Tensor
    assert other[0].weight.resting == "int8:row" and torch.equal(other(X), model(X))


@pytest.fixture
def group() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        where = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
        yield
        dist.destroy_process_group()


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("offloaded", [False, True])
def test_asynchronous_saves_hold_the_moment(storage: str, offloaded: bool, group: None) -> None:
    assert lives.saved_behind_the_back(storage, offloaded) == [True, True, True]


@pytest.mark.parametrize("storage", STORAGES)
def test_torchs_own_load_into_rows_is_right_or_refused(storage: str, group: None) -> None:
    for said in (lives.loaded_into_rows(storage), *on_ranks(2, lives.loaded_into_rows, storage)):
        assert said == "as saved" or "to which writes are lost" in said
    said = lives.written_to_what_is_given(storage)
    assert len(said) == 2 and all("to which writes are lost" in each for each in said)


def test_room_for_copies_is_a_weight_and_other_room_is_plain() -> None:
    weight = net("nf4")[0].weight
    assert type(weight.new_empty(weight.shape, device="cpu")) is stowage.StowedTensor
    for made in (weight.new_empty(weight.shape), weight.new_empty((3, 64), device="cpu")):
        assert type(made) is torch.Tensor and made.dtype == torch.float32

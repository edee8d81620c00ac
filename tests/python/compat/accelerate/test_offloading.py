# SPDX-License-Identifier: Apache-2.0
"""Offloaded and dispatched models compute what they did, with weights that can be read."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatched import Block, Rooted, Small
from torch import nn

import stowage
import stowage.compat.accelerate as accelerate
from stowage.compat.accelerate.hooks import remove_hook_from_module
from stowage.compat.accelerate.utils import (
    get_state_dict_offloaded_model,
    has_offloaded_params,
)

IDS = torch.arange(12).reshape(3, 4)


def made(width: int = 160) -> Rooted:
    torch.manual_seed(0)
    return Rooted(width).eval()


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("how", ["cpu", "disk", "map"])
def test_outputs_are_those_of_the_resident_model(how: str, buffers: bool, tmp_path: Path) -> None:
    model, wanted = made(), made()(IDS)
    folder = tmp_path / "folder"
    if how == "cpu":
        assert accelerate.cpu_offload(model, offload_buffers=buffers) is model
    elif how == "disk":
        accelerate.disk_offload(model, folder, "cpu", offload_buffers=buffers)
    else:
        places = {"scale": "cpu", "embed": "cpu", "head": "cpu", "shift": "cpu",
                  "blocks.0": "disk", "blocks.1": "cpu"}  # fmt: skip
        dispatched = accelerate.dispatch_model(model, places, offload_dir=folder)
        assert dispatched.hf_device_map == places
    for _ in range(2):
        assert torch.equal(model(IDS), wanted)
    assert not any(p.is_meta for p in model.parameters())
    read = {name: value.float() for name, value in model.state_dict().items()}
    assert all(torch.equal(read[n], value) for n, value in made().state_dict().items())
    assert model.head.weight is model.embed.weight
    assert has_offloaded_params(model.blocks[0].first) is (how != "cpu")
    assert has_offloaded_params(model.blocks[1].first) is (how == "disk")
    accelerate.hooks.remove_hook_from_submodules(model)
    assert type(model.blocks[0].first.weight) is nn.Parameter
    assert torch.equal(model(IDS), wanted)


def test_the_folder_is_written_once_and_used_again(tmp_path: Path) -> None:
    accelerate.disk_offload(made(), tmp_path)
    before = {f: f.stat().st_mtime_ns for f in tmp_path.iterdir()}
    model = accelerate.disk_offload(made(), tmp_path)
    accelerate.disk_offload(model, tmp_path)  # nothing to do
    assert before == {f: f.stat().st_mtime_ns for f in tmp_path.iterdir()}
    assert len(before) == 1
    assert torch.equal(model(IDS), made()(IDS))


def test_all_on_the_disk_or_all_in_memory(tmp_path: Path) -> None:
    wanted = made()(IDS)
    names = [name for name, _ in made().named_parameters(remove_duplicate=False)]
    places = dict.fromkeys([*names, "shift", "blocks.1.mask"], "disk")
    model = accelerate.dispatch_model(made(), places, offload_dir=tmp_path)
    assert torch.equal(model(IDS), wanted)
    model = accelerate.dispatch_model(made(), {"": "cpu"})
    assert torch.equal(model(IDS), wanted)
    assert model.hf_device_map == {"": "cpu"}


def test_the_longest_name_counts_and_ties_stay_in_memory(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="one tensor and stay in memory"):
        model = accelerate.dispatch_model(
            made(), {"": "cpu", "blocks": "disk", "head": "disk"}, offload_dir=tmp_path
        )
    assert has_offloaded_params(model.blocks[1].second)
    assert not has_offloaded_params(model.head)
    assert torch.equal(model(IDS), made()(IDS))


def test_moving_a_dispatched_model(tmp_path: Path) -> None:
    """To the CPU it is there already; to another dtype weights compute in it."""
    model = accelerate.disk_offload(made(), tmp_path)
    assert torch.equal(model.to("cpu")(IDS), made()(IDS))
    wanted = made().to(torch.bfloat16)(IDS)
    assert torch.allclose(model.to(torch.bfloat16)(IDS).float(), wanted.float(), rtol=0.1, atol=0.1)


def test_unused_parts_and_preloaded_classes(tmp_path: Path) -> None:
    """A layer whose weight is used without its forward needs no mention here."""

    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.idle = nn.Linear(160, 160), nn.Linear(160, 160)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.dense.weight) @ self.dense.weight

    model, x = Unused(), torch.randn(2, 160)
    wanted = model(x)
    accelerate.disk_offload(model, tmp_path, preload_module_classes=["Unused"])
    assert torch.equal(model(x), wanted)


def test_state_of_an_offloaded_model_has_the_root(tmp_path: Path) -> None:
    """Row 44."""
    model = accelerate.disk_offload(made(), tmp_path)
    found, wanted = get_state_dict_offloaded_model(model), made().state_dict()
    assert list(found) == list(wanted)
    assert all(type(found[n]) is torch.Tensor and torch.equal(found[n], wanted[n]) for n in wanted)
    resting = made()
    stowage.stow(resting, "int8")
    kept = get_state_dict_offloaded_model(accelerate.disk_offload(resting, tmp_path / "resting"))
    assert kept["blocks.0.first.weight"].resting == "int8:row"


def test_models_without_parameters(tmp_path: Path) -> None:
    """Row 55: accelerate raises StopIteration."""
    model = nn.Sequential(nn.ReLU(), nn.Flatten())
    x = torch.randn(2, 3)
    assert torch.equal(accelerate.cpu_offload(model)(x), x.relu())
    assert torch.equal(accelerate.disk_offload(model, tmp_path)(x), x.relu())
    hooked, hook = accelerate.cpu_offload_with_hook(nn.ReLU(), "cpu")
    _, second = accelerate.cpu_offload_with_hook(nn.ReLU(), "cpu", prev_module_hook=hook)
    assert torch.equal(hooked(x), x.relu())
    second.offload()
    second.remove()


def test_refusals_change_nothing(tmp_path: Path) -> None:
    model = made()
    with pytest.raises(ValueError, match="offload_dir must be given"):
        accelerate.dispatch_model(model, {"": "disk"})
    with pytest.raises(ValueError, match=r"none for: .*embed\.weight"):
        accelerate.dispatch_model(model, {"blocks": "cpu"})
    with accelerate.init_empty_weights():
        empty = Rooted(160)
    for call in (
        lambda: accelerate.cpu_offload(empty),
        lambda: accelerate.dispatch_model(empty, {"": "cpu"}),
    ):
        with pytest.raises(ValueError, match=r"must have values.*scale"):
            call()
    (tmp_path / "other.txt").write_text("")
    with pytest.raises(ValueError, match="must be empty or hold a model"):
        accelerate.disk_offload(model, tmp_path)
    assert not has_offloaded_params(model.head)
    assert not hasattr(model, "hf_device_map")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is one here")
def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    for call in (
        lambda: accelerate.cpu_offload(made(), "cuda"),
        lambda: accelerate.disk_offload(made(), tmp_path / "a", 0),
        lambda: accelerate.dispatch_model(made(), {"": 0, "blocks": "disk"}, offload_dir=tmp_path),
    ):
        with pytest.raises((ValueError, RuntimeError), match=r"here: cpu|no accelerator|available"):
            call()
    assert not (tmp_path / "a").exists()


def test_values_of_other_places_are_taken(tmp_path: Path) -> None:
    wanted, x = Small().eval(), torch.randn(2, 3)
    with accelerate.init_empty_weights():
        model = Small()
    accelerate.cpu_offload(model.eval(), state_dict=wanted.state_dict())
    assert torch.equal(model(x), wanted(x))
    accelerate.utils.offload_state_dict(tmp_path, wanted.state_dict())
    index = dict(accelerate.utils.OffloadedWeightsLoader(save_folder=tmp_path).index)
    with accelerate.init_empty_weights():
        model = Small()
    accelerate.dispatch_model(model.eval(), {"": "cpu"}, offload_dir=tmp_path, offload_index=index)
    assert torch.equal(model(x), wanted(x))


def test_values_of_a_tied_model_stay_tied() -> None:
    with accelerate.init_empty_weights():
        model = Rooted(160)
    state = {**made().state_dict(), "phase": made().phase}
    accelerate.dispatch_model(model.eval(), {"": "cpu"}, state_dict=state)
    assert model.head.weight is model.embed.weight
    assert torch.equal(model(IDS), made()(IDS))


def test_another_map_for_a_dispatched_model_is_refused(tmp_path: Path) -> None:
    places = {"": "disk"}
    model = accelerate.dispatch_model(made(), places, offload_dir=tmp_path)
    accelerate.dispatch_model(model, places, offload_dir=tmp_path)  # nothing to do
    with pytest.raises(ValueError, match="remove_hook_from_module"):
        accelerate.dispatch_model(model, {"": "cpu"})
    accelerate.hooks.remove_hook_from_module(model)
    accelerate.dispatch_model(model, {"": "cpu"})
    assert torch.equal(model(IDS), made()(IDS))


@pytest.mark.parametrize("include_buffers", [False, True, None])
def test_empty_weights(include_buffers: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("ACCELERATE_INIT_INCLUDE_BUFFERS", "0")
    register = nn.Module.register_parameter
    with accelerate.init_empty_weights(include_buffers):
        model = Rooted(8)
        with accelerate.init_on_device("cpu"):
            inner = nn.Linear(2, 2)
        huge = nn.Linear(10**5, 10**4, bias=False)  # 4 GB
    assert nn.Module.register_parameter is register
    assert all(p.is_meta for p in [*model.parameters(), huge.weight])
    assert model.shift.is_meta is bool(include_buffers)
    assert not inner.weight.is_meta
    assert not nn.Linear(2, 2).weight.is_meta
    assert model.head.weight is model.embed.weight


def test_empty_weights_are_of_one_thread() -> None:
    import threading

    found: list[bool] = []
    with accelerate.init_empty_weights():
        thread = threading.Thread(target=lambda: found.append(nn.Linear(2, 2).weight.is_meta))
        thread.start()
        thread.join()
    assert found == [False]


def test_copies_share_the_folder(tmp_path: Path) -> None:
    model = accelerate.disk_offload(made(), tmp_path)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.blocks[0].first.weight.zero_()
    assert torch.equal(model(IDS), made()(IDS))
    assert not torch.equal(other(IDS), made()(IDS))


def test_layerwise_casting_and_offloading_stack(tmp_path: Path) -> None:
    """Row 56: accelerate keeps the wide values, and cannot save."""
    fp8, f32 = torch.float8_e4m3fn, torch.float32
    model, reference = nn.Sequential(Block(320)), nn.Sequential(Block(320))
    reference.load_state_dict(model.state_dict())
    accelerate.hooks.attach_layerwise_casting_hooks(reference, fp8, f32)
    accelerate.hooks.attach_layerwise_casting_hooks(model, fp8, f32)
    size = stowage.nbytes(model)
    accelerate.disk_offload(model, tmp_path)
    x = torch.randn(2, 320)
    assert torch.equal(model(x), reference(x))
    assert (tmp_path / "model.safetensors").stat().st_size < size + 10_000
    assert len(get_state_dict_offloaded_model(model)) == 4
    remove_hook_from_module(model, recurse=True)
    assert model[0].first.weight.resting == "f8_e4m3"

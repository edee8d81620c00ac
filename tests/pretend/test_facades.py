# SPDX-License-Identifier: Apache-2.0
"""Models whose weights rest in memory or on a disk and compute on devices, pretend ones."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from diffused import how
from dispatched import Block, Rooted
from pretend_device import counted, counters
from torch import nn

import stowage
from stowage._ops.memory import is_borrowed
from stowage.compat import accelerate
from stowage.compat.accelerate.hooks import (
    AlignDevicesHook,
    add_hook_to_module,
    remove_hook_from_submodules,
)
from stowage.compat.accelerate.utils import align_module_device
from stowage.compat.diffusers.hooks import apply_group_offloading
from stowage.compat.diffusers.hooks import group_offloading as grouping

HOME, OTHER = torch.device("pretend:0"), torch.device("pretend:1")
IDS = torch.arange(12).reshape(3, 4)


def made() -> Rooted:
    torch.manual_seed(0)
    return Rooted(160).eval()


def there() -> torch.Tensor:
    """What the model gives when it is on the device whole."""
    return made().to(HOME)(IDS.to(HOME)).cpu()


def from_memory(folder: Path) -> nn.Module:
    return accelerate.cpu_offload(made(), HOME)


def from_where_it_was(folder: Path) -> nn.Module:
    return accelerate.cpu_offload(made().to(HOME))


def from_disk(folder: Path) -> nn.Module:
    return accelerate.disk_offload(made(), folder, HOME)


def mixed(folder: Path) -> nn.Module:
    places: dict[str, Any] = {"": 0, "blocks.0": "cpu", "blocks.1": "disk"}
    return accelerate.dispatch_model(made(), places, offload_dir=folder)


def in_groups(folder: Path) -> nn.Module:
    model = made()
    apply_group_offloading(model, HOME, **how("block_level", None), use_stream=True)
    return model


def in_groups_from_disk(folder: Path) -> nn.Module:
    model = made()
    apply_group_offloading(model, "pretend:0", **how("leaf_level", folder))
    assert grouping._get_group_onload_device(model) == HOME
    return model


@pytest.mark.parametrize(
    "way",
    [from_memory, from_where_it_was, from_disk, mixed, in_groups, in_groups_from_disk],
)
def test_outputs_are_those_of_the_device(way: Any, tmp_path: Path) -> None:
    wanted = there()
    with counted(), torch.no_grad():
        model = way(tmp_path / "rest")
        for _ in range(3):
            assert torch.allclose(model(IDS).cpu(), wanted, atol=1e-5)
        assert model.blocks[0].first.weight.device.type == "cpu"
        if way is not from_where_it_was:  # torch itself tears ties on the way to this device
            assert model.head.weight is model.embed.weight
        values = {n: v.cpu().float() for n, v in model.state_dict().items()}
        assert all(torch.equal(values[n], v) for n, v in made().state_dict().items())
        remove_hook_from_submodules(model)
        assert type(model.blocks[0].first.weight) is nn.Parameter
        assert torch.allclose(model.cpu()(IDS), made()(IDS), atol=1e-5)


def test_several_devices_move_what_is_computed() -> None:
    """Each part computes where its weights are; the output is where the input was."""
    model = nn.Sequential(Block(160), Block(160), Block(160)).eval()
    x = torch.randn(3, 160)
    wanted = copy.deepcopy(model)(x)
    seen = []
    places = {"0": 0, "1": 1, "2": 1}
    accelerate.dispatch_model(model, places)
    for block in model:
        block.register_forward_hook(lambda *given: seen.append(given[2].device))
    with torch.no_grad():
        result = model(x)
    assert torch.allclose(result, wanted, atol=1e-5)
    assert result.device == x.device
    assert seen[:2] == [HOME, OTHER]
    assert model[1].first.weight.device == OTHER
    assert model.hf_device_map == places


def test_one_device_is_moved_to() -> None:
    model = accelerate.dispatch_model(made(), {"": 1})
    assert model.head.weight.device == OTHER


def test_a_checkpoint_onto_a_device_and_a_disk(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    state = {n: t.clone() for n, t in made().state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    wanted = there()
    for places in ({"": 0}, {"": 0, "blocks.1": "disk"}, {"": 0, "blocks.1": "cpu"}):
        with accelerate.init_empty_weights():
            model = Rooted(160)
        model.phase = made().phase
        accelerate.load_checkpoint_and_dispatch(
            model.eval(), tmp_path, places, offload_folder=tmp_path / "rest"
        )
        with torch.no_grad():
            assert torch.allclose(model(IDS.to(HOME)).cpu(), wanted, atol=1e-5)


def test_what_goes_from_a_checkpoint_to_a_disk_is_never_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import save_file

    save_file({n: t.clone() for n, t in made().state_dict().items()}, tmp_path / "m.safetensors")
    with accelerate.init_empty_weights():
        model = Rooted(160)
    given = []

    def dispatched(model: Any, *_: Any, **__: Any) -> Any:
        given.append(
            {
                n: isinstance(p, stowage.StowedTensor) and is_borrowed(p.parts["codes"])
                for n, p in model.named_parameters()
            }
        )
        return model

    monkeypatch.setattr(accelerate._loading, "dispatch_model", dispatched)
    places = {"": 0, "blocks.1": "disk"}
    file = tmp_path / "m.safetensors"
    accelerate.load_checkpoint_and_dispatch(model, file, places, offload_folder=tmp_path / "rest")
    mapped = {name for name, borrowed in given[0].items() if borrowed}
    assert mapped == {n for n in given[0] if n.startswith("blocks.1.") and "weight" in n}


def test_models_take_turns_on_the_device() -> None:
    first, hook = accelerate.cpu_offload_with_hook(Block(8))
    second, other = accelerate.cpu_offload_with_hook(Block(8), HOME, prev_module_hook=hook)
    x = torch.randn(2, 8)
    with torch.no_grad():
        middle = first(x)
        assert middle.device == HOME
        assert first.first.weight.device == HOME
        second(middle)
    assert first.first.weight.device.type == "cpu"
    assert second.first.weight.device == HOME
    other.offload()
    assert second.first.weight.device.type == "cpu"
    other.remove()


def test_hooks_align_modules_and_inputs() -> None:
    layer = add_hook_to_module(nn.Linear(4, 4), AlignDevicesHook(HOME, io_same_device=True))
    assert layer.weight.device == HOME
    with torch.no_grad():
        assert layer(torch.randn(2, 4)).device.type == "cpu"


def test_row_54_writes_on_a_device_stay() -> None:
    layer = nn.Linear(4, 4)
    weight = layer.weight
    with align_module_device(layer, HOME), torch.no_grad():
        assert layer.weight.device == HOME
        layer.weight.fill_(3)
        layer.bias.data = torch.ones(4, device=HOME)
    assert layer.weight is weight
    assert layer.weight.unique().tolist() == [3]
    assert layer.bias.tolist() == [1, 1, 1, 1]


def test_little_is_on_the_device() -> None:
    """Two of sixteen layers and the small tensors, not the model."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(16))).eval()
    layer = 512 * 512 * 4
    with counted(), torch.no_grad():
        held = counters().held
        accelerate.cpu_offload(model, HOME)
        model(torch.randn(1, 512))
        assert counters().held - held < 3 * layer
        remove_hook_from_submodules(model)

# SPDX-License-Identifier: Apache-2.0
"""Group offloading of diffusers' models and of any other, in memory and on a disk."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from diffused import CPU, how, run, transformer, unet
from offloadable import Model, X, made
from torch import nn

import stowage
from stowage._tiers.disk.engine import engine_of
from stowage._tiers.disk.journal import has_places
from stowage.compat.diffusers import patched
from stowage.compat.diffusers.hooks import apply_group_offloading
from stowage.compat.diffusers.hooks import group_offloading as ours

KINDS = pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
DISK = pytest.mark.parametrize("disk", [False, True])


@pytest.mark.parametrize("build", [unet, transformer])
@DISK
@KINDS
def test_models_of_diffusers_compute_what_they_did(
    kind: str, disk: bool, build: Any, tmp_path: Path
) -> None:
    model = build()
    wanted = run(model)
    with patched():
        model.enable_group_offload(CPU, **how(kind, tmp_path if disk else None))
        for _ in range(2):
            assert torch.equal(run(model), wanted)
        assert model.device == CPU
        assert model.to("cpu") is model
        assert any(has_places(part) for part in model.modules()) is disk
    assert torch.equal(run(model), wanted)  # and after the patch
    hooked = [m for m in model.modules() if hasattr(m, "_diffusers_hook")]
    assert hooked
    assert all(m._diffusers_hook.get_hook("group_offloading") is not None for m in hooked)
    files = [f.name for f in tmp_path.rglob("*.safetensors")]
    assert files == (["model.safetensors"] if disk else [])


def test_diffusers_own_functions_see_it(tmp_path: Path) -> None:
    theirs = pytest.importorskip("diffusers.hooks.group_offloading")
    model = unet()
    for module in (theirs, ours):
        assert not module._is_group_offload_enabled(model)
        with pytest.raises(ValueError, match=r"offloaded|not enabled"):
            module._get_group_onload_device(model)
    apply_group_offloading(model, "cpu", **how("leaf_level", tmp_path))
    for module in (theirs, ours):
        assert module._is_group_offload_enabled(model)
        assert module._get_group_onload_device(model) == CPU
        assert module._get_group_onload_device(model.conv_in) == CPU
    wanted = run(model)
    model._diffusers_hook.remove_hook("group_offloading", recurse=True)
    assert not ours._is_group_offload_enabled(model)
    assert not any(isinstance(p, stowage.StowedTensor) for p in model.parameters())
    assert torch.equal(run(model), wanted)


@DISK
@KINDS
def test_diffusers_does_not_take_over(kind: str, disk: bool, tmp_path: Path) -> None:
    """Outside `patched` its loaders of adapters would offload the model again in its own way."""
    theirs = pytest.importorskip("diffusers.hooks.group_offloading")
    model = unet()
    wanted = run(model)
    apply_group_offloading(model, CPU, **how(kind, tmp_path if disk else None))
    with pytest.raises(ValueError, match=r"inside stowage\.compat\.diffusers\.patched"):
        theirs._maybe_remove_and_reapply_group_offloading(model)
    assert torch.equal(run(model), wanted)
    apply_group_offloading(model, CPU, **how(kind, tmp_path if disk else None))
    with patched():
        theirs._maybe_remove_and_reapply_group_offloading(model)
    assert torch.equal(run(model), wanted)
    assert ours._is_group_offload_enabled(model)


def test_footprint_and_dtype_are_those_of_before(tmp_path: Path) -> None:
    model = unet()
    before = model.get_memory_footprint(), model.dtype
    apply_group_offloading(model, CPU, **how("leaf_level", tmp_path))
    assert (model.get_memory_footprint(), model.dtype) == before


def test_positional_order() -> None:
    import inspect

    theirs = pytest.importorskip("diffusers.hooks")
    names = list(inspect.signature(theirs.apply_group_offloading).parameters)
    assert list(inspect.signature(apply_group_offloading).parameters) == names


def test_patches_end(tmp_path: Path) -> None:
    theirs = pytest.importorskip("diffusers.hooks")
    inner = pytest.importorskip("diffusers.hooks.group_offloading")
    names = [n for n in vars(ours) if n in vars(inner) and callable(vars(ours)[n])]
    before = {n: vars(inner)[n] for n in names}
    with patched():
        assert theirs.apply_group_offloading is apply_group_offloading
        assert inner._is_group_offload_enabled is ours._is_group_offload_enabled
    assert before == {n: vars(inner)[n] for n in names}


def test_contradictions_are_refused_together(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"(?s)offload_device.*record_s.*num_blocks_per"):
        apply_group_offloading(made(), CPU, "meta", record_stream=True)
    with pytest.raises(ValueError, match="block_level or leaf_level"):
        apply_group_offloading(made(), CPU, offload_type="layer")
    model = made()
    stowage.offload(model, ram="1MiB", folder=tmp_path)
    with pytest.raises(ValueError, match="onload it first"):
        apply_group_offloading(model, CPU, offload_type="leaf_level")
    with pytest.raises(ValueError, match=r"scale.*meta"):
        apply_group_offloading(made().to("meta"), CPU, offload_type="leaf_level")
    theirs = pytest.importorskip("diffusers.hooks")
    model = made()
    theirs.apply_group_offloading(model, CPU, offload_type="leaf_level")
    with pytest.raises(ValueError, match="offloaded by diffusers itself"):
        apply_group_offloading(model, CPU, offload_type="leaf_level")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is one here")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="device must be"):
        apply_group_offloading(made(), "cuda", offload_type="leaf_level", use_stream=True)


def test_budgets_follow_groups(tmp_path: Path) -> None:
    model = nn.Module()
    model.blocks = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(6)))
    block = 512 * 512 * 4
    rams = []
    for number in (1, 2, 3):
        one = copy.deepcopy(model)
        apply_group_offloading(one, CPU, num_blocks_per_group=number, offload_to_disk_path=tmp_path)
        rams.append(engine_of(one).ram)
    assert rams[1:] == [4 * block, 6 * block]
    assert 2 * block <= rams[0] < 3 * block
    other = copy.deepcopy(model)
    apply_group_offloading(
        other, CPU, num_blocks_per_group=4, offload_to_disk_path=tmp_path, block_modules=["none"]
    )
    assert engine_of(other).ram == rams[0]


def test_copies_and_pickles(tmp_path: Path) -> None:
    model = made()
    apply_group_offloading(model, CPU, **how("leaf_level", tmp_path))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(X), model(X))


def test_a_second_call_and_what_was_added_since(tmp_path: Path) -> None:
    model = made()
    apply_group_offloading(model, CPU, **how("leaf_level", None))
    apply_group_offloading(model, CPU, **how("leaf_level", tmp_path))
    apply_group_offloading(model, CPU, **how("block_level", tmp_path))
    wanted = model(X)
    model.added = nn.Linear(2, 2)
    ours._maybe_remove_and_reapply_group_offloading(model)
    assert ours._is_group_offload_enabled(model.added)
    assert torch.equal(model(X), wanted)
    ours._maybe_remove_and_reapply_group_offloading(plain := made())
    assert not ours._is_group_offload_enabled(plain)


def test_adapters_are_trained_over_offloaded_weights(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model: Model = made()
    apply_group_offloading(model, CPU, **how("leaf_level", tmp_path))
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["blocks.1"], init_lora_weights=False)
    )
    adapted(X).sum().backward()
    learnt = {n for n, p in adapted.named_parameters() if p.grad is not None}
    assert learnt
    assert all("lora" in n for n in learnt)


def test_a_pipeline_shares_one_folder(tmp_path: Path) -> None:
    """Row 30: two components with equal names and shapes."""
    diffusers = pytest.importorskip("diffusers")

    class Pipeline(diffusers.DiffusionPipeline):  # type: ignore[misc,name-defined]
        def __init__(self, one: nn.Module, other: nn.Module) -> None:
            super().__init__()
            self.register_modules(one=one, other=other)

    one, other = unet(), unet()
    nn.init.ones_(other.conv_out.bias)
    wanted = run(one), run(other)
    assert not torch.equal(*wanted)
    pipe = Pipeline(one, other)
    with patched():
        pipe.enable_group_offload(
            CPU, offload_type="leaf_level", offload_to_disk_path=str(tmp_path)
        )
        assert (torch.equal(run(one), wanted[0]), torch.equal(run(other), wanted[1])) == (
            True,
            True,
        )
        assert pipe.device == CPU
    assert len(list(tmp_path.iterdir())) == 2

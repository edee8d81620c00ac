# SPDX-License-Identifier: Apache-2.0
"""Defects of diffusers' group offloading, rows 20 to 32 of the list, as tests of the facade."""

from __future__ import annotations

import copy
from pathlib import Path

import fresh
import pytest
import torch
from diffused import CPU, how, run, unet
from offloadable import X, made

import stowage
from stowage.compat.diffusers.hooks import apply_group_offloading, apply_layerwise_casting

DISK = pytest.mark.parametrize("disk", [False, True])


def test_rows_20_21_30_each_model_has_its_folder(tmp_path: Path) -> None:
    """Files of other weights, another dtype or another component were taken for the model's."""
    models = [made(seed=0), made(seed=1), made(dtype=torch.bfloat16), made("int8"), made(seed=0)]
    for model in models:
        x = X.to(model.scale.dtype)
        wanted = model(x)
        apply_group_offloading(model, CPU, **how("leaf_level", tmp_path))
        assert torch.equal(model(x), wanted)
    assert len(list(tmp_path.iterdir())) == 4  # the last is the first


def test_rows_22_23_31_values_are_there_at_rest(tmp_path: Path) -> None:
    """State dicts and norms were of uninitialised memory."""
    model, whole = made(), made()
    apply_group_offloading(model, CPU, **how("leaf_level", tmp_path))
    image = unet()
    apply_group_offloading(image, CPU, **how("leaf_level", tmp_path))
    image.save_pretrained(tmp_path / "theirs")  # type: ignore[operator]
    stowage.save(image, tmp_path / "ours", dtype=torch.float32)
    wanted = unet().state_dict()
    for folder in ("theirs", "ours"):
        opened = type(image).from_pretrained(tmp_path / folder)  # type: ignore[attr-defined]
        again = copy.deepcopy(opened).eval()  # into aligned memory, on which sums depend
        found = again.state_dict()
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert torch.equal(run(again), run(image))
    for name, value in whole.state_dict().items():
        assert torch.equal(model.state_dict()[name] + 0, value)
        assert model.state_dict()[name].norm() == value.norm()


def test_row_24_updates_are_kept(tmp_path: Path) -> None:
    """Files were written once."""
    model = made()
    apply_group_offloading(model, CPU, **how("leaf_level", tmp_path))
    before = model(X)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert not model(X).any()
    assert before.any()


def test_rows_25_26_backward_and_exceptions(tmp_path: Path) -> None:
    model, whole = made(), made()
    apply_group_offloading(model, CPU, **how("leaf_level", tmp_path))
    with pytest.raises(ValueError, match="finite"):
        model(X * torch.nan)
    for one in (model, whole):
        one(X).sum().backward()
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


@DISK
@pytest.mark.parametrize("first", ["casting", "offloading"])
def test_row_29_casting_and_offloading_in_any_order(first: str, disk: bool, tmp_path: Path) -> None:
    """Offloading first bypassed the casting: four times the bytes, other values."""
    fp8, f32 = torch.float8_e4m3fn, torch.float32
    model, whole = made(), made()
    apply_layerwise_casting(whole, fp8, f32)
    for step in (first, "casting" if first == "offloading" else "offloading"):
        if step == "casting":
            apply_layerwise_casting(model, fp8, f32)
        else:
            apply_group_offloading(model, CPU, **how("leaf_level", tmp_path if disk else None))
    assert torch.equal(model(X), whole(X))
    assert stowage.nbytes(model) == stowage.nbytes(whole)
    if disk and first == "casting":
        (file,) = tmp_path.rglob("*.safetensors")
        assert file.stat().st_size < stowage.nbytes(whole) + 20_000


CHILD = """
import importlib.abc, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("accelerate", "diffusers", "transformers", "peft"):
            raise ImportError(name)
sys.meta_path.insert(0, Absent())
import torch
from stowage.compat.diffusers.hooks import apply_group_offloading
model = torch.nn.Linear(160, 160)
wanted = model(torch.ones(160))
apply_group_offloading(model, "cpu", offload_type="leaf_level", offload_to_disk_path=sys.argv[1])
assert torch.equal(model(torch.ones(160)), wanted)
assert model._diffusers_hook.get_hook("group_offloading") is not None
"""


def test_row_32_nothing_of_others_is_needed(tmp_path: Path) -> None:
    fresh.run(CHILD, tmp_path).check_returncode()

# SPDX-License-Identifier: Apache-2.0
"""Merging adapters into resting weights: one rounding, exact undoing, all or nothing."""

from __future__ import annotations

import copy
import gc
import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from mergeable import CONFIGS, IDS, LINEAR, adapted, base_octets, layers, merged_by_peft, octets

import stowage
from stowage.integrations import peft as stowed_peft
from stowage.tensor import StowedTensor

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("storage", ["f8_e4m3", "f8_e4m3:row", "int8", "nf4", "bf16"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_row_18_every_adapter_is_merged_with_one_rounding_and_taken_out_exactly(
    kind: str, storage: str
) -> None:
    """A peer: Promotion for Float8 Types is not supported."""
    model = adapted(storage, kind)
    before, wanted = octets(model), merged_by_peft(model)
    names = stowed_peft.merge(model)
    assert names and all(name.rpartition(".")[2] in (*LINEAR, "embed", "conv") for name in names)
    changed = 0
    for name, parameter in model.named_parameters():
        if isinstance(parameter, StowedTensor):
            expected = stowage.quantize(wanted[name], storage).dequantize(torch.float32)
            assert torch.equal(parameter.dequantize(torch.float32), expected), name
            changed += octets_of(parameter) != before[f"{name}.codes"]
        elif "base_layer.bias" in name:
            assert torch.equal(parameter, wanted[name])
    assert changed == len(names)
    twin = copy.deepcopy(model)
    assert stowed_peft.unmerge(model) == names
    assert octets(model) == before and not any(layer.merged for layer in layers(model))
    stowed_peft.unmerge(twin)  # a copy of a merged model has what it needs
    assert octets(twin) == before


def octets_of(weight: StowedTensor) -> bytes:
    codes = weight.parts["codes"].contiguous().reshape(-1).view(torch.uint8)
    return codes.numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_merged_model_computes_as_its_weights_say(dtype: torch.dtype) -> None:
    model = adapted("int8", dtype=dtype)
    apart = model(IDS)
    stowed_peft.merge(model)
    twin = copy.deepcopy(model)
    stowage.unstow(twin)
    limit = 0.02 if dtype is torch.float32 else 0.2
    assert (model(IDS) - twin(IDS)).abs().max() < limit / 4
    assert (model(IDS) - apart).abs().max() < limit * 10
    assert not torch.equal(model(IDS), apart)
    stowed_peft.unmerge(model)
    assert torch.equal(model(IDS), apart)


def test_several_adapters_are_rounded_once_in_any_number_of_calls() -> None:
    model = adapted("nf4")
    torch.manual_seed(5)
    model.add_adapter("second", copy.deepcopy(CONFIGS["lora"]))
    before = octets(model)
    stowed_peft.merge(model, ["default", "second"])
    together = octets(model)
    stowed_peft.unmerge(model)
    stowed_peft.merge(model, ["default"])
    assert stowed_peft.merge(model, ["default"]) == []
    stowed_peft.merge(model, ["second"])
    assert octets(model) == together
    assert layers(model)[0].merged_adapters == ["default", "second"]
    stowed_peft.unmerge(model)
    assert octets(model) == before


def test_kept_on_the_disk_and_gone_with_the_merge(tmp_path: Path) -> None:
    model = adapted("int8")
    before = octets(model)
    stowed_peft.merge(model, keep="disk", folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(stowage.BadFile):
        damage(model, next(tmp_path.iterdir()))
    stowed_peft.merge(model, keep="disk", folder=tmp_path)
    stowed_peft.unmerge(model)
    gc.collect()
    assert octets(model) == before and not list(tmp_path.iterdir())


def damage(model: Any, file: Path) -> None:
    """A damaged file is refused, and taken when it is restored with its time."""
    held, merged, facts = file.read_bytes(), octets(model), file.stat()
    with open(file, "r+b") as opened:
        opened.seek(-3, os.SEEK_END)
        opened.write(bytes([held[-3] ^ 1]))
    try:
        stowed_peft.unmerge(model)
    finally:
        assert octets(model) == merged
        with open(file, "r+b") as opened:
            opened.write(held)
        os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))
        stowed_peft.unmerge(model)


def test_pefts_own_unmerge_and_disabled_adapters_restore_what_was_kept() -> None:
    model = adapted("nf4")
    before = octets(model)
    apart = model(IDS)
    with model.disable_adapter():
        base = model(IDS)
    stowed_peft.merge(model)
    model.unmerge_adapter()
    assert octets(model) == before
    stowed_peft.merge(model)
    with model.disable_adapter():  # PEFT takes merged adapters out here
        assert torch.equal(model(IDS), base)
    assert octets(model) == before and torch.equal(model(IDS), apart)


def test_choosing_another_adapter_restores_what_was_kept() -> None:
    """PEFT takes merged adapters out when another is added or made active."""
    model = adapted("nf4")
    before = base_octets(model)
    stowed_peft.merge(model)
    model.add_adapter("second", copy.deepcopy(CONFIGS["lora"]))
    assert base_octets(model) == before
    stowed_peft.merge(model)
    model.set_adapter("second")
    assert base_octets(model) == before


def test_pefts_own_merge_inside_the_context_is_ours() -> None:
    model = adapted("f8_e4m3")
    before = octets(model)
    stowed_peft.merge(model, rounding="stochastic", seed=9)
    wanted = octets(model)
    stowed_peft.unmerge(model)
    with stowed_peft.merging(model, rounding="stochastic", seed=9):
        model.merge_adapter()
    assert octets(model) == wanted and "merge" not in layers(model)[0].__dict__
    model.unmerge_adapter()
    assert octets(model) == before


def test_bare_merge_of_peft_is_not_reversible() -> None:
    """What the context is for: it rounds, and unmerging rounds again."""
    model = adapted("f8_e4m3")
    before = octets(model)
    model.merge_adapter()
    with pytest.raises(stowage.InvalidArgument, match="must be kept"):
        stowed_peft.unmerge(model)
    model.unmerge_adapter()
    assert octets(model) != before


def test_bare_merge_of_a_small_delta_is_refused() -> None:
    """Adding less than the rounding step would be lost, so the weight refuses."""
    model = adapted("nf4")
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.mul_(1e-3)
    with pytest.raises(stowage.Unsupported, match="less than its rounding step"):
        model.merge_adapter()

# SPDX-License-Identifier: Apache-2.0
"""What code for diffusers' casting and offloading relies on, asked of diffusers and of the facade:
what is the same, and each difference that docs/compat.md names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffused
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from stowage.compat.diffusers import patched
from stowage.tensor import StowedTensor

pytest.importorskip("diffusers")
E4M3 = torch.float8_e4m3fn


def adapted() -> Any:
    peft = pytest.importorskip("peft")
    model: Any = diffused.transformer()
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["to_q"], init_lora_weights=False))
    return model


def cast(model: Any, **kwargs: Any) -> Any:
    model.enable_layerwise_casting(storage_dtype=E4M3, compute_dtype=torch.float32, **kwargs)
    return model


def resting(model: nn.Module) -> set[str]:
    """Names of the weights that rest as fp8, by either side's way of telling it."""
    return {
        name
        for name, p in model.named_parameters()
        if name.endswith("weight")
        and (p.resting == "f8_e4m3" if isinstance(p, StowedTensor) else p.dtype is E4M3)
    }


def rest_of(model: nn.Module) -> torch.Tensor:
    """As the peer's suite reads it, but for `weight.dtype`: the name of the storage tells."""
    return next(p for n, p in model.named_parameters() if n in resting(model))


def test_the_storage_of_a_cast_model_is_told_by_storage_and_not_by_dtype() -> None:
    """diffusers' own suite reads `weight.dtype`, which is that of the computation here."""
    peer = cast(adapted())
    with patched():
        mine = cast(adapted())
    assert resting(mine) == resting(peer) and len(resting(mine)) > 10
    assert rest_of(peer).dtype is E4M3
    held = rest_of(mine)
    assert isinstance(held, StowedTensor)
    assert (held.dtype, held.resting) == (torch.float32, "f8_e4m3")
    assert held.parts["codes"].nbytes == held.numel()


def test_adapters_that_were_cast_are_saved(tmp_path: Path) -> None:
    """With patterns of one's own the adapters are cast as well."""
    peer = cast(adapted(), skip_modules_pattern=["norm"])
    peer.save_lora_adapter(tmp_path / "theirs")
    with patched():
        mine = cast(adapted(), skip_modules_pattern=["norm"])
        assert any("lora_A" in name for name in resting(mine))
        mine.save_lora_adapter(tmp_path / "ours")
        mine.save_lora_adapter(tmp_path / "wide", upcast_before_saving=True)
        assert any("lora_A" in name for name in resting(mine))
    name = "pytorch_lora_weights.safetensors"
    theirs = load_file(tmp_path / "theirs" / name)
    for folder in ("ours", "wide"):
        ours = load_file(tmp_path / folder / name)
        assert ours.keys() == theirs.keys() and len(ours) == 6
        for key, value in ours.items():
            assert value.dtype is torch.float32
            assert torch.equal(value, theirs[key].float()), key
    fresh: Any = diffused.transformer()
    fresh.load_lora_adapter(str(tmp_path / "ours"), prefix=None, weight_name=name)
    assert torch.isfinite(diffused.run(fresh)).all()


@pytest.mark.parametrize("kind", ["leaf_level", "block_level"])
def test_a_folder_of_group_offloading_holds_one_file(kind: str, tmp_path: Path) -> None:
    """diffusers writes group_*.safetensors, which its suite counts; ours is one, with an index."""
    how = diffused.how(kind, tmp_path / "theirs")
    peer: Any = diffused.transformer()
    expected = diffused.run(peer)
    peer.enable_group_offload(diffused.CPU, **how)
    groups = sorted((tmp_path / "theirs").rglob("group_*.safetensors"))
    with patched():
        mine: Any = diffused.transformer()
        mine.enable_group_offload(diffused.CPU, **diffused.how(kind, tmp_path / "ours"))
        assert torch.equal(diffused.run(mine), expected)
    files = sorted((tmp_path / "ours").rglob("*.safetensors"))
    assert len(groups) > 1 and [path.name for path in files] == ["model.safetensors"]
    held = {name for path in groups for name in load_file(path)}
    assert len(load_file(files[0])) >= len(held) > 0

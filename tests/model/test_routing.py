# SPDX-License-Identifier: Apache-2.0
"""What a mixture of experts reads of its weights when few experts have tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fresh
import pytest
import routed_experts
import torch
from routed_experts import EXPERTS, HIDDEN, ROUTED, STORAGES, WAYS, build, experts_of, routed

import stowage
from stowage._ops.library import composite_forced

pytest.importorskip("transformers")


@pytest.mark.skipif(composite_forced(), reason="stock operations read what they index")
def test_memory_of_experts_without_a_token_is_not_touched(tmp_path: Path) -> None:
    """In memory and in a mapped file, forward and backward: it cannot be read meanwhile."""
    ended = fresh.script(Path(routed_experts.__file__), tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("could be read") == 2 * len(WAYS) * len(STORAGES)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("way", WAYS)
def test_scales_of_experts_without_a_token_are_not_used(storage: str, way: str) -> None:
    """They are made NaN, which any use would show."""
    torch.manual_seed(0)
    model = build()
    stowage.stow(model, rules={"*.experts.*_proj": storage})
    experts, x = experts_of(model), torch.randn(6, HIDDEN)
    with torch.no_grad():
        wanted = routed(experts, way, x)
    others = [i for i in range(EXPERTS) if i not in ROUTED]
    for weight in experts.parameters():
        scale = list(weight.parts.values())[1].view(EXPERTS, -1)
        scale[others] = 255 if scale.dtype is torch.uint8 else torch.nan
        assert weight[others[0]].dequantize().isnan().any()
    with torch.no_grad():
        got = routed(experts, way, x)
    assert torch.equal(got, wanted) and got.isfinite().all()


def test_a_write_to_an_expert_of_a_mapped_file_is_seen(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build()
    stowage.stow(model, rules={"*.experts.*_proj": "f8_e4m3:row2"})
    stowage.save(model, tmp_path)
    x, found = torch.randn(6, HIDDEN), []
    for mmap in (False, True):
        experts: Any = experts_of(stowage.load(build, tmp_path, mmap=mmap))
        with torch.no_grad():
            before = routed(experts, "eager", x)
            experts.down_proj[ROUTED[0]] = 0.25
            found.append((before, routed(experts, "eager", x)))
    assert all(map(torch.equal, *found))
    assert not torch.equal(*found[0])

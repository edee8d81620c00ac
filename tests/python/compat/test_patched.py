# SPDX-License-Identifier: Apache-2.0
"""The methods of diffusers' models while they are ours, and afterwards."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

from stowage.compat.diffusers import enable_layerwise_casting, get_memory_footprint, patched
from stowage.compat.diffusers.hooks import apply_layerwise_casting

modeling = pytest.importorskip("diffusers.models.modeling_utils")
hooks = pytest.importorskip("diffusers.hooks")


class Model(modeling.ModelMixin):  # type: ignore[misc,name-defined]
    _keep_in_fp32_modules = None

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = torch.nn.Linear(32, 32), torch.nn.LayerNorm(32)


def test_footprint_counts_what_rests() -> None:
    """diffusers multiplies by the element size of the compute dtype."""
    made, dense = Model(), Model().get_memory_footprint()
    enable_layerwise_casting(made, torch.float8_e4m3fn)
    rest = 32 * 32 + 4 * 3 * 32
    assert get_memory_footprint(made) == rest
    with patched():
        assert made.get_memory_footprint() == rest
    assert made.get_memory_footprint() == dense


def test_patches_end_with_their_context() -> None:
    before = modeling.ModelMixin.enable_layerwise_casting, hooks.apply_layerwise_casting
    with pytest.raises(KeyError), patched(), patched():
        assert hooks.apply_layerwise_casting is apply_layerwise_casting
        raise KeyError
    assert before == (modeling.ModelMixin.enable_layerwise_casting, hooks.apply_layerwise_casting)
    assert not hasattr(modeling.ModelMixin, "disable_layerwise_casting")

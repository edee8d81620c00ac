# SPDX-License-Identifier: Apache-2.0
"""Small models of diffusers, and arguments of group offloading, for the tests of the facade."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

CPU = torch.device("cpu")


def how(kind: str, folder: Path | None) -> dict[str, Any]:
    blocks = {"num_blocks_per_group": 1} if kind == "block_level" else {}
    return {"offload_type": kind, **blocks, "offload_to_disk_path": folder and str(folder)}


def unet() -> nn.Module:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    return diffusers.UNet2DModel(
        sample_size=8, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).eval()  # fmt: skip


def transformer() -> nn.Module:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    return diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=1, in_channels=4, num_layers=3, attention_head_dim=32,
        num_attention_heads=4, joint_attention_dim=32, caption_projection_dim=128,
        pooled_projection_dim=64, out_channels=4,
    ).eval()  # fmt: skip


def run(model: nn.Module) -> torch.Tensor:
    torch.manual_seed(1)
    with torch.inference_mode():
        if type(model).__name__ == "UNet2DModel":
            return model(torch.randn(1, 3, 8, 8), 3).sample
        hidden, text, pooled = torch.randn(1, 4, 8, 8), torch.randn(1, 5, 32), torch.randn(1, 64)
        return model(hidden, text, pooled, torch.tensor([3])).sample

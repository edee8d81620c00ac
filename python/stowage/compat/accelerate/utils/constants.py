# SPDX-License-Identifier: Apache-2.0
"""`accelerate.utils.constants`: the names of files, and the layers that layerwise casting casts."""

from __future__ import annotations

from typing import Any

from torch import nn

from stowage.compat.accelerate._peer import forwarded

WEIGHTS_NAME = "pytorch_model.bin"
WEIGHTS_INDEX_NAME = "pytorch_model.bin.index.json"
SAFE_WEIGHTS_NAME = "model.safetensors"
SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"
SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)


def __getattr__(name: str) -> Any:
    return forwarded("accelerate.utils.constants", name)

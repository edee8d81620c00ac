# SPDX-License-Identifier: Apache-2.0
"""`accelerate.big_modeling`: models that are larger than a device, or than memory."""

from __future__ import annotations

from typing import Any

from stowage.compat.accelerate._casting import attach_layerwise_casting_hooks
from stowage.compat.accelerate._creating import init_empty_weights, init_on_device
from stowage.compat.accelerate._loading import load_checkpoint_and_dispatch
from stowage.compat.accelerate._offloading import (
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
)
from stowage.compat.accelerate._peer import forwarded

__all__ = [
    "attach_layerwise_casting_hooks",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
]


def __getattr__(name: str) -> Any:
    return forwarded("accelerate.big_modeling", name)

# SPDX-License-Identifier: Apache-2.0
"""Inputs and outputs of modules to a device, less what a caller wants to keep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from stowage._tiers.device.activations import moved


def send(value: Any, device: Any, skip_keys: str | Iterable[str] | None = None) -> Any:
    """`value` with every tensor in it on `device`; entries of mappings named in `skip_keys` stay as
    they are. Containers keep their types."""
    skipped = (skip_keys,) if isinstance(skip_keys, str) else tuple(skip_keys or ())
    if not skipped or not isinstance(value, Mapping):
        return moved(value, torch.device(device))
    items = {k: v if k in skipped else send(v, device, skipped) for k, v in value.items()}
    return type(value)(items)  # type: ignore[call-arg]

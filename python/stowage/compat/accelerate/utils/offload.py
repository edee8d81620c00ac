# SPDX-License-Identifier: Apache-2.0
"""`accelerate.utils.offload`: weights as raw files beside an index."""

from __future__ import annotations

from typing import Any

from stowage.compat.accelerate._files import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    load_offloaded_weight,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)
from stowage.compat.accelerate._peer import forwarded

__all__ = [
    "OffloadedWeightsLoader",
    "PrefixedDataset",
    "extract_submodules_state_dict",
    "load_offloaded_weight",
    "offload_state_dict",
    "offload_weight",
    "save_offload_index",
]


def __getattr__(name: str) -> Any:
    return forwarded("accelerate.utils.offload", name)

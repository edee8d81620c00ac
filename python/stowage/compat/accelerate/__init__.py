# SPDX-License-Identifier: Apache-2.0
"""Big models as accelerate 1.15 has them, over Stowage: `import stowage.compat.accelerate`.

Importing this does not import accelerate; names that are not about big models are its own, where
it is installed.
"""

from __future__ import annotations

from typing import Any

from stowage.compat.accelerate import big_modeling, hooks, utils
from stowage.compat.accelerate._loading import load_checkpoint_in_model
from stowage.compat.accelerate._maps import infer_auto_device_map
from stowage.compat.accelerate._peer import forwarded
from stowage.compat.accelerate.big_modeling import (
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    init_on_device,
    load_checkpoint_and_dispatch,
)

__all__ = [
    "big_modeling",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "hooks",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "utils",
]
__version__ = "1.15.0"  # whose names these are


def __getattr__(name: str) -> Any:
    return forwarded("accelerate", name)

# SPDX-License-Identifier: Apache-2.0
"""The 4-bit weights of bitsandbytes 0.50 over Stowage: `import stowage.compat.bitsandbytes as bnb`.

Importing this does not import bitsandbytes. `torch.ops.bitsandbytes` gets our ops under the names
that nobody has defined; bitsandbytes takes them back when it is imported. LLM.int8 and optimizers
are those of bitsandbytes, where it is installed.
"""

from __future__ import annotations

from typing import Any

from stowage.compat.bitsandbytes import _ops, functional, nn, optim
from stowage.compat.bitsandbytes._peer import forwarded
from stowage.compat.bitsandbytes.functional import matmul_4bit

__all__ = ["features", "functional", "matmul_4bit", "nn", "optim", "supported_torch_devices"]
__version__ = "0.50.2"  # whose names these are

features = {"multi_backend"}
supported_torch_devices = {"cpu", "cuda", "xpu", "hpu", "npu", "mps"}
_ops.register()


def __getattr__(name: str) -> Any:
    return forwarded("bitsandbytes", frozenset({"MatmulLtState", "matmul"}), name)

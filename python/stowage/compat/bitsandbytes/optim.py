# SPDX-License-Identifier: Apache-2.0
"""`bitsandbytes.optim`: that of bitsandbytes itself, where it is installed."""

from __future__ import annotations

from typing import Any

from stowage.compat.bitsandbytes._peer import peers


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return peers("bitsandbytes.optim", name)

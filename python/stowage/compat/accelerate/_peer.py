# SPDX-License-Identifier: Apache-2.0
"""Names of accelerate that are not about big models (Accelerator, data loaders, launchers): its own
objects where it is installed."""

from __future__ import annotations

import importlib
from typing import Any


def forwarded(module: str, name: str) -> Any:
    """`name` of accelerate's `module`, such as "accelerate.utils". Raises AttributeError where
    neither of us has it."""
    ours = f"stowage.compat.{module}"
    if not name.startswith("__"):
        try:
            return getattr(importlib.import_module(module), name)
        except ImportError:
            text = f"{ours}: {name!r} must come from accelerate itself, which is not installed"
            raise AttributeError(text) from None
        except AttributeError:
            pass
    raise AttributeError(f"module {ours!r} has no attribute {name!r}")

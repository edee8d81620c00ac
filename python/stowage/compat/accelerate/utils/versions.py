# SPDX-License-Identifier: Apache-2.0
"""`accelerate.utils.versions`. All its names are accelerate's own."""

from __future__ import annotations

from typing import Any

from stowage.compat.accelerate._peer import forwarded


def __getattr__(name: str) -> Any:
    return forwarded("accelerate.utils.versions", name)

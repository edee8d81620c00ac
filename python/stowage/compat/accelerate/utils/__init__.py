# SPDX-License-Identifier: Apache-2.0
"""`accelerate.utils`, as far as it concerns big models; other names are accelerate's own."""

from __future__ import annotations

from typing import Any

from stowage.compat.accelerate._peer import forwarded
from stowage.compat.accelerate.utils import constants, modeling, offload
from stowage.compat.accelerate.utils.modeling import *  # noqa: F403
from stowage.compat.accelerate.utils.offload import *  # noqa: F403

__all__ = ["constants", "modeling", "offload", *modeling.__all__, *offload.__all__]


def __getattr__(name: str) -> Any:
    return forwarded("accelerate.utils", name)

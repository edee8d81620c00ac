# SPDX-License-Identifier: Apache-2.0
"""Code of ours that no compiler is to look at."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from stowage._ops import _torch

T = TypeVar("T")
_dynamo_callback = _torch.get_eval_frame_callback


def eagerly(function: Callable[..., T], *arguments: object) -> T:
    """Calls it. Code around a graph break runs with dynamo on, which would compile what that calls
    in pieces."""
    if _dynamo_callback() is None:
        return function(*arguments)
    made: T = torch.compiler.disable(function)(*arguments)
    return made

# SPDX-License-Identifier: Apache-2.0
"""The one place that looks at the stack: for torch's own code that calls operators as anybody does,
and must be answered otherwise.

Every frame is looked at. Modes, default devices, hooks and wrappers put any number of frames
between such code and an operator, so nothing may depend on how many there are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

_MODES = frozenset({"__torch_function__", "__torch_dispatch__"})  # which pass calls on


def nearest(package: str) -> FrameType | None:
    """The innermost frame of `package`, modes that are defined in it not counted."""
    for frame in above(sys._getframe()):
        if module_of(frame).startswith(package) and frame.f_code.co_name not in _MODES:
            return frame
    return None


def above(frame: FrameType | None) -> Iterator[FrameType]:
    """`frame` and all that wait for it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))

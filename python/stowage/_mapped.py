# SPDX-License-Identifier: Apache-2.0
"""Memory that a file is mapped to read-only: copied before a write, which would end the process."""

from torch import Tensor


def ensure_writable(part: Tensor) -> None:
    """Gives `part` a copy of its memory if that is mapped read-only.

    The tensor object stays, so every alias of a weight, which has the same object, follows.
    """
    if part.device.type == "cpu" and not part.untyped_storage().resizable() and _read_only(part):
        part.data = part.clone()


def _read_only(part: Tensor) -> bool:
    first = part.data_ptr()
    last = first + part.nbytes
    with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
        for line in maps:
            span, permissions = line.split(maxsplit=2)[:2]
            start, stop = (int(end, 16) for end in span.split("-"))
            if start < last and first < stop and "w" not in permissions:
                return True
    return False

# SPDX-License-Identifier: Apache-2.0
"""Memory that a file is mapped to read-only: copied before a write, which would end the process."""

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor

from stowage._memory import new_copy

_copier: Callable[[Tensor], Tensor] = new_copy
_copies = 0  # made so far, of mapped memory that was written to, or of models that changed


def copies_made() -> int:
    """A number that changes whenever a weight may have left its file."""
    return _copies


def note_copies() -> None:
    global _copies
    _copies += 1


def copy_with(copier: Callable[[Tensor], Tensor]) -> None:
    """Has `copier` decide where copies of mapped memory go that is written to."""
    global _copier
    _copier = copier


def copied(part: Tensor, memo: dict[int, Any]) -> Tensor:
    """A deep copy; of mapped memory one that is made at the first write."""
    return part.detach() if is_mapped_read_only(part) else copy.deepcopy(part, memo)


def ensure_writable(part: Tensor) -> None:
    """Gives `part` a copy of its memory if that is mapped read-only.

    The tensor object stays, so every alias of a weight, which has the same object, follows.
    """
    if is_mapped_read_only(part):
        part.data = _copier(part)
        note_copies()


def is_mapped_read_only(part: Tensor) -> bool:
    """Whether a write to this memory would end the process."""
    return is_borrowed(part) and _read_only(part)


def is_borrowed(part: Tensor) -> bool:
    """Whether this is memory that torch did not allocate: mapped from a file."""
    return part.device.type == "cpu" and not part.untyped_storage().resizable()


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

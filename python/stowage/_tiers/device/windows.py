# SPDX-License-Identifier: Apache-2.0
"""Where in a ring a unit may go: the bytes of units whose next use is farthest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class RingSlot(Generic[T]):
    """Bytes [begin, end) that `unit` has."""

    begin: int
    end: int
    unit: T


@dataclass(frozen=True)
class Window(Generic[T]):
    """Bytes from `begin` on that are free once `leaving` have left."""

    begin: int
    leaving: tuple[RingSlot[T], ...]


def best_window(
    slots: Sequence[RingSlot[T]],
    total: int,
    size: int,
    distance: Callable[[T], float | None],
) -> Window[T] | None:
    """The window of `size` bytes in a ring of `total` whose units are farthest from their next use.

    `slots` are in order. `distance` says how far a unit's next use is, None that it must stay. Of
    windows that are equally far the one with fewest bytes leaving is taken. None where every window
    has a unit that must stay.
    """
    far = [distance(slot.unit) for slot in slots]
    best: tuple[float, int] | None = None
    found: Window[T] | None = None
    for first in range(len(slots) + 1):
        begin = slots[first - 1].end if first else 0
        last, nearest, bytes_leaving = first, float("inf"), 0
        while (slots[last].begin if last < len(slots) else total) - begin < size:
            distant = far[last] if last < len(slots) else None
            if distant is None:
                break
            nearest = min(nearest, distant)
            bytes_leaving += slots[last].end - slots[last].begin
            last += 1
        else:
            value = (nearest, -bytes_leaving)
            if best is None or value > best:
                best, found = value, Window(begin, tuple(slots[first:last]))
    return found

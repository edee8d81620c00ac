# SPDX-License-Identifier: Apache-2.0
"""What matrices of each size have of a ring: those of an expert are used together, and a prompt
that uses all of one stack would leave none for the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

from stowage._tiers.device.reuse import Reuse


class Sized(Protocol):
    size: int  # bytes that it takes in a ring


U = TypeVar("U", bound=Sized)


class Shares(Generic[U]):
    def __init__(self) -> None:
        self._reuse: dict[int, Reuse[U]] = {}  # by size
        self._taken: dict[int, int] = {}  # bytes
        self._given: dict[int, int] = {}
        self._counts: dict[int, int] = {}  # how many there are, here or not

    def give(self, bytes_of_ring: int, rooms: Mapping[int, int]) -> None:
        """So many bytes, by those that all matrices of a size would take; one matrix at least."""
        total = sum(rooms.values())
        self._given = {n: max(n, bytes_of_ring * room // total) for n, room in rooms.items()}
        self._counts = {size: room // size for size, room in rooms.items()}

    def may_grow(self, size: int) -> bool:
        return self._taken.get(size, 0) + size <= self._given.get(size, 0)

    def is_within(self, unit: U) -> bool:
        """Whether those of its size take no more than they have."""
        return self._taken.get(unit.size, 0) <= self._given.get(unit.size, 0)

    def use(self, unit: U) -> None:
        self._of(unit.size).use(unit)

    def come(self, unit: U) -> None:
        self._of(unit.size).come(unit)
        self._taken[unit.size] = self._taken.get(unit.size, 0) + unit.size

    def leave(self, unit: U) -> None:
        self._of(unit.size).leave(unit)
        self._taken[unit.size] -= unit.size

    def forget(self, unit: U) -> None:
        """Of one that has left."""
        self._of(unit.size).forget(unit)

    def leaving(self, size: int, may_leave: Callable[[U], bool], *, in_turn: bool) -> U | None:
        """Which of a size leaves for another; `in_turn`: all are used, one after another."""
        reuse = self._of(size)
        return reuse.latest(may_leave) if in_turn else reuse.least(may_leave)

    def _of(self, size: int) -> Reuse[U]:
        if size not in self._reuse:
            self._reuse[size] = Reuse(self._counts.get(size, 1))
        return self._reuse[size]

# SPDX-License-Identifier: Apache-2.0
"""Which of many units of one size leaves for another.

Where some of them are used now and then, the one that was used least and longest ago: a use counts
half as much after a half-life (LRFU: Lee et al., IEEE Transactions on Computers 50, 2001), the one
that an engine of the core begins with (src/engine/reuse.h). Where all are used in turn, that would
always be the next one: then one that was used just now, as one comes only after all others."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

_PART = 8  # of as many uses as there are units, a half-life
_AT_A_TIME = 32

U = TypeVar("U")


@dataclass
class _Use:
    often: float = 0.0  # as of the last use
    at: int = 0
    rank: float = 0.0  # when a single use would count as much as all of its own do now


class Reuse(Generic[U]):
    """Of `count` units. One is known from its first use on, here or not."""

    def __init__(self, count: int) -> None:
        self._half_life = max(1.0, count / _PART)
        self._uses: dict[int, _Use] = {}  # by id, of units that somebody else keeps
        self._here: dict[int, U] = {}  # those used last behind
        self._ranks: list[tuple[float, int]] = []  # a heap: of each unit here, now or before
        self._clock = 0

    def use(self, unit: U) -> None:
        self._clock += 1
        use = self._uses.setdefault(id(unit), _Use())
        use.often = use.often * 0.5 ** ((self._clock - use.at) / self._half_life) + 1
        use.at, use.rank = self._clock, self._clock + self._half_life * math.log2(use.often)
        if self._here.pop(id(unit), None) is not None:
            self._here[id(unit)] = unit

    def come(self, unit: U) -> None:
        """It is here from now on."""
        self._here[id(unit)] = unit
        if len(self._ranks) > 4 * len(self._here) + 64:  # of many that left
            self._ranks = [(self._rank(key), key) for key in self._here]
            heapify(self._ranks)
        else:
            heappush(self._ranks, (self._rank(id(unit)), id(unit)))

    def leave(self, unit: U) -> None:
        self._here.pop(id(unit), None)

    def forget(self, unit: U) -> None:
        self.leave(unit)
        self._uses.pop(id(unit), None)

    def least(self, may_leave: Callable[[U], bool]) -> U | None:
        """The unit to leave; None where none may. Ranks rise only: what has an old one goes back
        with the new one."""
        aside: list[tuple[float, int]] = []
        found: U | None = None
        while self._ranks and found is None:
            rank, key = heappop(self._ranks)
            unit = self._here.get(key)
            if unit is None:
                continue
            if rank < self._rank(key):
                heappush(self._ranks, (self._rank(key), key))
                continue
            aside.append((rank, key))
            found = unit if may_leave(unit) else None
        for entry in aside:
            heappush(self._ranks, entry)
        return found

    def latest(self, may_leave: Callable[[U], bool]) -> U | None:
        """One of those that were used last, a quarter of all, so that more than one is on its way
        at a time: of them the first."""
        found: U | None = None
        left = min(_AT_A_TIME, max(1, len(self._here) // 4))
        for unit in reversed(self._here.values()):
            if may_leave(unit):
                found, left = unit, left - 1
            if not left:
                break
        return found

    def _rank(self, key: int) -> float:
        use = self._uses.get(key)
        return 0.0 if use is None else use.rank

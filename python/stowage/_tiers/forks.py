# SPDX-License-Identifier: Apache-2.0
"""Objects that a fork of the process concerns."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Generic, TypeVar

T = TypeVar("T")


class Living(Generic[T]):
    """The living objects of a kind. Forks are watched from the first one on: before them, and in
    the child after them, each object is given to what was named for that."""

    def __init__(
        self,
        *,
        before: Callable[[T], None] | None = None,
        after_in_child: Callable[[T], None] | None = None,
    ) -> None:
        self._all: weakref.WeakSet[T] = weakref.WeakSet()
        given = {"before": before, "after_in_child": after_in_child}
        self._told = {when: tell for when, tell in given.items() if tell is not None}

    def add(self, one: T) -> None:
        if self._told:
            os.register_at_fork(**{when: partial(self._tell, t) for when, t in self._told.items()})
            self._told = {}
        self._all.add(one)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._all))

    def _tell(self, tell: Callable[[T], None]) -> None:
        for one in self:
            tell(one)

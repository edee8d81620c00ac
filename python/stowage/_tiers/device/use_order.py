# SPDX-License-Identifier: Apache-2.0
"""What is used after what, learnt from use."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator

_MOST = 1 << 16  # pairs that are remembered; then all are learnt anew


class UseOrder:
    """What came before the current unit tells a forward pass from a backward one, so the pair of
    both leads to the next. A guess may be wrong."""

    def __init__(self) -> None:
        self._next: dict[tuple[Hashable, Hashable, Hashable], Hashable] = {}
        self._told: dict[Hashable, Hashable] = {}
        self._signature: Hashable = None
        self._before: Hashable = None
        self._now: Hashable = None

    def expect(self, order: Iterable[Hashable]) -> None:
        """The order to begin with; its end leads to its beginning."""
        given = list(order)
        self._told = dict(zip(given, given[1:] + given[:1], strict=True))

    def set_signature(self, signature: Hashable) -> None:
        self._signature = signature

    def note(self, unit: Hashable) -> None:
        """`unit` is used now."""
        if len(self._next) > _MOST:
            self._next.clear()
        for signature in (self._signature, None):  # None: of any, for signatures that are new
            self._next[signature, self._before, self._now] = unit
        self._before, self._now = self._now, unit

    def ahead(self, most: int) -> Iterator[Hashable]:
        """What is expected next, nearest first, each once, at most `most` steps ahead. The unit in
        use comes where it is used again."""
        before, now = self._before, self._now
        seen: set[Hashable] = set()
        for _ in range(most):
            after = self._next.get((self._signature, before, now))
            if after is None:
                after = self._next.get((None, before, now), self._told.get(now))
            if after is None:
                return
            if after not in seen:
                seen.add(after)
                yield after
            before, now = now, after

# SPDX-License-Identifier: Apache-2.0
"""Asks the system for a file's bytes before they are read, from all shards: a mapping alone asks
for a few pages at a time, and waits for each. What was asked for lies in the page cache, not in the
process: its pages are given back at once, and while a large tensor is read those behind."""

from __future__ import annotations

import bisect
import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

from stowage._ops import library

WINDOW = 256 << 20  # bytes asked for and not yet used: page cache, which the system may take back
_PIECE = 2 << 20
_SWEEP = 0.002  # seconds after which the pages of the tensor that is being read go


@dataclass(frozen=True)
class Extent:
    """A tensor of an open file."""

    file: int  # as ops name it
    name: str
    bytes: int


@dataclass
class ReadAhead:
    """Advice only: what cannot be had is an error of whoever reads it. As a context, it ends with
    the block; the files must be open until then."""

    extents: Iterable[Extent]
    _used: int = 0
    _stopped: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None

    def __enter__(self) -> ReadAhead:
        self._thread = threading.Thread(target=self._run, name="stowage-ahead", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def use(self, count: int) -> None:
        """So many bytes more have been read."""
        with self._changed:
            self._used += count
            self._changed.notify()

    def _run(self) -> None:
        asked = 0
        extents = list(self.extents)
        ends = list(accumulate(extent.bytes for extent in extents))
        for extent in extents:
            for begin in range(0, extent.bytes, _PIECE):
                size = min(_PIECE, extent.bytes - begin)
                if not self._wait(asked + size, extents, ends):
                    return
                asked += size
                library.file_populate(extent.file, extent.name, begin, size)
                library.file_drop(extent.file, extent.name)
        self._wait(math.inf, extents, ends)

    def _wait(self, asked: float, extents: list[Extent], ends: list[int]) -> bool:
        """Until `asked` bytes lie within the window; False when all is over."""
        while True:
            with self._changed:
                if self._stopped or asked - self._used <= WINDOW:
                    return not self._stopped
                self._changed.wait(_SWEEP)
                current = bisect.bisect_right(ends, self._used)
            if current < len(extents) and extents[current].bytes > _PIECE:
                library.file_drop(extents[current].file, extents[current].name)

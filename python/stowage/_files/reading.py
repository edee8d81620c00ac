# SPDX-License-Identifier: Apache-2.0
"""What goes on around the reading of many tensors in turn: the system is asked for them ahead, and
a terminal shows how far it is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from stowage._files.ahead import ReadAhead
from stowage._files.flat import Entry
from stowage._files.source import Source

_SOON = 1.0  # seconds: a bar for less would only flicker


@contextmanager
def reading(
    source: Source, entries: Sequence[Entry], progress: bool
) -> Iterator[Callable[[Entry], None]]:
    """Gives what to call when an entry has been read; `entries` are those that will be."""
    sizes = {entry.name: source.size(entry) for entry in entries}
    listeners: list[Callable[[int], object]] = []
    with ExitStack() as stack:
        if extents := [extent for entry in entries for extent in source.extents(entry)]:
            listeners.append(stack.enter_context(ReadAhead(extents)).use)
        if progress and sys.stderr is not None and sys.stderr.isatty():
            from tqdm import tqdm  # type: ignore[import-untyped]  # 2 MiB that few loads need

            total = sum(sizes.values())
            bar = tqdm(total=total, unit="B", unit_scale=True, desc="loading", delay=_SOON)
            listeners.append(stack.enter_context(bar).update)

        def done(entry: Entry) -> None:
            for listener in listeners:
                listener(sizes.get(entry.name, 0))

        yield done

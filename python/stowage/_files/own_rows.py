# SPDX-License-Identifier: Apache-2.0
"""Some rows of an entry of a file, as a model has them, and no more of the file than they are made
of: those of a run of its rows, of whole heads, and of some matrices of a stack."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from stowage._files.names import Entry
from stowage._files.sources import FileSource
from stowage._files.stacks import put
from stowage._ops.storage import Storage


def rows_together(storage: Storage | None, shape: tuple[int, ...]) -> int:
    """So many rows end where blocks do."""
    if storage is None or not shape or storage.by_columns:
        return 1
    columns = math.prod(shape[1:])
    if storage.flat and columns:
        return storage.block // math.gcd(columns, storage.block)
    return storage.rows_together(shape)


def rounded_out(first: int, last: int, each: int, count: int) -> tuple[int, int]:
    """The least rows around [first, last) of `count` that begin and end where `each` do."""
    return first // each * each, min(-(-last // each) * each, count)


class OwnRows:
    """Rows [first, last) of entries of a file. Of stacks dim 0 is that of matrices."""

    def __init__(self, source: FileSource) -> None:
        self._source = source

    def values(self, entry: Entry, first: int, last: int) -> torch.Tensor:
        """Of a plain entry; all of one that has no rows."""
        if not entry.shape:
            return entry.as_in_model(self._source.copy(entry.parts[0]))
        if entry.pieces:
            assert entry.dtype is not None
            made = torch.empty((last - first, *entry.shape[1:]), dtype=entry.dtype, device="cpu")
            for piece in _pieces(entry, first, last):
                assert piece.place is not None
                rows = self._source.value_rows(piece.parts[0], 0, piece.shape[0])
                put([piece.place.values(made, piece.shape)], [rows])
            return made
        start, stop, heads = _whole_heads(entry, first, last)
        runs = [self._source.value_rows(entry.parts[0], *run) for run in _runs(entry, start, stop)]
        found = runs[0] if len(runs) == 1 else torch.cat(runs)
        found = replace(entry, heads=heads).as_in_model(found)
        return found[first - start : last - start]

    def parts(
        self, entry: Entry, first: int, last: int, compute: torch.dtype
    ) -> tuple[list[torch.Tensor], int, int]:
        """Of one that rests: the parts of a weight of rows [start, stop), which are these and those
        that blocks or heads bind to them; parts of all rows are whole. And start and stop."""
        storage = entry.storage
        assert storage is not None
        if entry.pieces:
            return self._of_stack(entry, storage, first, last, compute), first, last
        heads = entry.shape[0] // entry.heads if entry.heads else 1
        each = math.lcm(rows_together(storage, entry.shape), heads)
        start, stop = rounded_out(first, last, each, entry.shape[0])
        runs = [
            self._source.part_rows(entry.whole, *run, compute) for run in _runs(entry, start, stop)
        ]
        parts = runs[0]
        if len(runs) > 1:
            of_rows = zip(*(run[: storage.in_rows] for run in runs), strict=True)
            parts = [*map(torch.cat, of_rows), *runs[0][storage.in_rows :]]
        if entry.heads:
            turned = replace(entry, heads=(stop - start) // heads)
            own = [turned.as_in_model(part) for part in parts[: storage.in_rows]]
            parts = [*own, *parts[storage.in_rows :]]
        return parts, start, stop

    def _of_stack(
        self, entry: Entry, storage: Storage, first: int, last: int, compute: torch.dtype
    ) -> list[torch.Tensor]:
        layout = storage.layout((last - first, *entry.shape[1:]))
        made = [torch.empty(sizes, dtype=dtype, device="cpu") for _, dtype, sizes in layout]
        for piece in _pieces(entry, first, last):
            assert piece.place is not None and piece.storage is not None
            places = piece.place.parts(made, piece.storage, piece.shape)
            put(places, self._source.part_rows(piece, 0, piece.shape[0], compute))
        return made


def _pieces(entry: Entry, first: int, last: int) -> Iterator[Entry]:
    """The matrices of a stack that lie in [first, last), with their places there."""
    for piece in entry.pieces:
        place = piece.place
        assert place is not None
        if first <= place.index < last:
            shape = (last - first, *place.shape[1:])
            yield replace(piece, place=replace(place, shape=shape, index=place.index - first))


def _whole_heads(entry: Entry, first: int, last: int) -> tuple[int, int, int]:
    """[first, last) with the rest of their heads, and how many these are."""
    if not entry.heads:
        return first, last, 0
    each = entry.shape[0] // entry.heads
    start, stop = rounded_out(first, last, each, entry.shape[0])
    return start, stop, (stop - start) // each


def _runs(entry: Entry, first: int, last: int) -> list[tuple[int, int]]:
    """The rows of the tensor that rows [first, last) of the entry are."""
    if entry.cut is None:
        return [(first, last)]
    found, begin = [], 0
    for start, stop in entry.cut.runs:
        low, high = max(first - begin, 0), min(last - begin, stop - start)
        if low < high:
            found.append((start + low, start + high))
        begin += stop - start
    return found or [(0, 0)]

# SPDX-License-Identifier: Apache-2.0
"""Where weights come from: a file or shard set that is mapped, or a dictionary of tensors; and how
many tensors are read in turn.

The system is asked for a file's bytes before they are read, from all shards: a mapping alone asks
for a few pages at a time, and waits for each. What was asked for lies in the page cache, not in the
process: its pages are given back at once, and while a large tensor is read those behind. A terminal
shows how far the reading is.
"""

from __future__ import annotations

import bisect
import json
import math
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch

from stowage._files.names import (
    DISK_DTYPES,
    DISK_NAMES,
    Entry,
    as_part,
    described,
    entries,
    unflatten,
)
from stowage._ops import library
from stowage._ops.errors import translated
from stowage._ops.memory import new_copy
from stowage._tensor.casts import plain_values
from stowage._tensor.stowed import StowedTensor

WINDOW = 256 << 20  # bytes asked for and not yet used: page cache, which the system may take back
_PIECE = 2 << 20
_SWEEP = 0.002  # seconds after which the pages of a large tensor that torch reads go
_SOON = 1.0  # seconds: a bar for less would only flicker


class Formed(NamedTuple):
    """Parts of weights that a file has in another order."""

    bytes: int = 0
    seconds: float = 0.0

    def and_one(self, size: int, seconds: float) -> Formed:
        return Formed(self.bytes + size, self.seconds + seconds)


class Source(Protocol):
    """Entries, and the tensors they are made of."""

    where: str
    entries: dict[str, Entry]
    ties: dict[str, str]  # name -> the name under which its tensor is written
    buffer_dtypes: dict[str, torch.dtype]  # of buffers that are not written

    def read(self, member: str) -> torch.Tensor:
        """A tensor by the name it has in the file; its memory may be mapped read-only."""

    def copy(self, member: str) -> torch.Tensor:
        """The same in memory of its own. May be called on several threads, as parts()."""

    def private(self, member: str, rows: tuple[int, int] | None) -> torch.Tensor | None:
        """The same, or rows [first, last) of it, in memory that may be written and is copied, page
        by page, when it is; None where there is no file."""

    def parts(
        self, entry: Entry, compute: torch.dtype, touched: bool = False, own: bool = False
    ) -> list[torch.Tensor]:
        """Codes and scales of a weight that rests, in the order of its layout. `compute`: what it
        will work in, which the scales of some dialects are rounded to. `touched`: what a file has
        in another order is put in order when it is touched, and not now. `own`: in memory of their
        own."""

    def size(self, entry: Entry) -> int:
        """Bytes of its tensors."""

    def extents(self, entry: Entry) -> list[Extent]:
        """Where they lie on a disk, if they do."""

    def drop(self, entry: Entry) -> None:
        """The entry has been read: its pages may go."""

    def check(self) -> None:
        """Raises BadFile where what was read may not be what was there when it was opened."""


class DictSource:
    """Flat tensors under file names, StowedTensors, or both."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.where = "the state"
        self._tensors = tensors
        self.entries = {entry.name: entry for entry in entries(tensors, self.where)}
        self.ties: dict[str, str] = {}
        self.buffer_dtypes: dict[str, torch.dtype] = {}

    def read(self, member: str) -> torch.Tensor:
        tensor = self._tensors[member]
        if isinstance(tensor, StowedTensor):  # no more than plain values: an entry that is plain
            return plain_values(tensor).detach()
        return tensor.detach()

    def copy(self, member: str) -> torch.Tensor:
        return new_copy(self.read(member))

    def private(self, member: str, rows: tuple[int, int] | None) -> torch.Tensor | None:
        return None

    def parts(
        self, entry: Entry, compute: torch.dtype, touched: bool = False, own: bool = False
    ) -> list[torch.Tensor]:
        tensor = self._tensors[entry.parts[0]]
        if isinstance(tensor, StowedTensor):
            parts = list(tensor.parts.values())
        else:
            parts = unflatten(entry, self.read)
        return [new_copy(part) for part in parts] if own else parts

    def size(self, entry: Entry) -> int:
        return sum(self._tensors[member].nbytes for member in entry.members)

    def extents(self, entry: Entry) -> list[Extent]:
        return []

    def drop(self, entry: Entry) -> None:
        pass

    def check(self) -> None:
        pass


class FileSource:
    """A .safetensors or .gguf file, a shard index, or a folder that holds one. Close it after use;
    tensors that were read stay valid."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.where = os.fspath(path)
        self._owners = 1
        try:
            self._handle = library.file_open(self.where)
            facts = json.loads(library.text(library.file_describe(self._handle)))
        except RuntimeError as error:
            raise translated(error) from None
        self._tensors = {tensor["name"]: tensor for tensor in facts["tensors"]}
        self.metadata: dict[str, str]
        self.formed = Formed()  # by now
        self._counting = threading.Lock()
        self.dialect: str = facts["dialect"]  # of a peer; "" for ours and for none
        self.paths: list[str] = facts["paths"]
        self.index: str = facts["index"]  # the path of a shard index, or ""
        self.markers: list[str] = facts["markers"]  # tensors that only show the dialect
        self.ours = "stowage" in facts["metadata"]  # has a manifest
        self.entries = self._entries(facts)
        metadata = self.metadata = facts["metadata"]
        self.ties = {a: b for a, b in metadata.items() if b in self.entries}
        dtypes = json.loads(metadata.get("stowage.buffer_dtypes", "{}"))
        self.buffer_dtypes = {name: getattr(torch, dtype) for name, dtype in dtypes.items()}

    def _entries(self, facts: dict[str, Any]) -> dict[str, Entry]:
        found = {entry.name: entry for entry in described(facts)}
        taken = {member for entry in found.values() for member in entry.members}
        taken.update(facts["markers"])
        for name, tensor in self._tensors.items():
            if name not in taken:
                dtype, beside = DISK_DTYPES.get(tensor["dtype"]), facts["unreadable"].get(name, "")
                shape = tuple(tensor["shape"])
                found[name] = Entry(name, shape, dtype, parts=(name,), scaled_by=beside)
        return found

    def read(self, member: str) -> torch.Tensor:
        return self._as_it_is(member, self._tensors[member]["shape"], library.file_read)

    def copy(self, member: str) -> torch.Tensor:
        return self._as_it_is(member, self._tensors[member]["shape"], library.file_copy)

    def private(self, member: str, rows: tuple[int, int] | None) -> torch.Tensor | None:
        facts = self._tensors[member]
        begin, end, shape = 0, facts["bytes"], facts["shape"]
        if rows is not None:
            each = end // shape[0]
            begin, end, shape = rows[0] * each, rows[1] * each, [rows[1] - rows[0], *shape[1:]]
        return self._as_it_is(
            member, shape, partial(library.file_map, begin=begin, bytes=end - begin)
        )

    def _as_it_is(
        self, member: str, shape: Sequence[int], op: Callable[[int, str], torch.Tensor]
    ) -> torch.Tensor:
        try:
            found = op(self._handle, member)
        except RuntimeError as error:
            raise translated(error) from None
        return self._typed(member, found, shape)

    def _typed(
        self, member: str, found: torch.Tensor, shape: Sequence[int] | None = None
    ) -> torch.Tensor:
        facts = self._tensors[member]
        dtype = DISK_DTYPES.get(facts["dtype"])  # blocks of GGUF have none: their bytes
        shape = facts["shape"] if shape is None else shape
        return found if dtype is None else found.view(dtype).reshape(shape)

    def value_rows(self, member: str, first: int, last: int) -> torch.Tensor:
        """Rows [first, last) of a plain tensor, in memory of their own."""
        facts = self._tensors[member]
        each = facts["bytes"] // max(facts["shape"][0], 1)
        op = partial(library.file_copy, begin=first * each, bytes=(last - first) * each)
        return self._as_it_is(member, [last - first, *facts["shape"][1:]], op)

    def part_rows(
        self, entry: Entry, first: int, last: int, compute: torch.dtype
    ) -> list[torch.Tensor]:
        """What rows [first, last) of a weight that rests have of its parts, as those of a weight of
        these rows; parts of all rows are whole. The rows end where blocks do."""
        assert entry.storage is not None
        begun, of_rows = time.perf_counter(), (last - first, *entry.shape[1:])
        try:
            found = library.file_rows(self._handle, entry.name, first, last, DISK_NAMES[compute])
        except RuntimeError as error:
            raise translated(error) from None
        self._note([part for i, part in enumerate(found) if entry.is_formed(i)], begun)
        layout = entry.storage.layout(entry.shape)
        in_rows = entry.storage.layout(of_rows)[: entry.storage.in_rows]
        parts = []
        for i, (name, dtype, shape) in enumerate((*in_rows, *layout[len(in_rows) :])):
            if name == "nested_offset":
                parts.append(torch.tensor(entry.nested_offset, dtype=dtype, device="cpu"))
            elif entry.is_formed(i):
                parts.append(found[i].view(dtype).reshape(shape))
            else:
                tensor = found[i].view(DISK_DTYPES[self._tensors[entry.parts[i]]["dtype"]])
                parts.append(as_part(entry.parts[i], tensor, dtype, shape))
        return parts

    def header(self, shard: int) -> bytes:
        """The JSON of one of its files, or all before the data of a GGUF file, as it lies there."""
        return bytes(library.file_header(self._handle, shard).numpy())

    def tensors(self) -> dict[str, dict[str, Any]]:
        """dtype (as headers spell it), shape, shard, offset and bytes of each tensor, by name."""
        return self._tensors

    def parts(
        self, entry: Entry, compute: torch.dtype, touched: bool = False, own: bool = False
    ) -> list[torch.Tensor]:
        if own:
            return self._own_parts(entry, compute)
        formed = partial(self._formed, entry.name, DISK_NAMES[compute], touched)
        return unflatten(entry, self.read, formed)

    def _own_parts(self, entry: Entry, compute: torch.dtype) -> list[torch.Tensor]:
        begun = time.perf_counter()
        try:
            found = library.file_parts(self._handle, entry.name, DISK_NAMES[compute])
        except RuntimeError as error:
            raise translated(error) from None
        self._note([part for i, part in enumerate(found) if entry.is_formed(i)], begun)
        whole = {
            member: self._typed(member, part)
            for i, (member, part) in enumerate(zip(entry.parts, found, strict=True))
            if member in self._tensors and not entry.is_formed(i)
        }
        return unflatten(entry, whole.__getitem__, found.__getitem__)

    def _note(self, formed: list[torch.Tensor], begun: float) -> None:
        size = sum(part.nbytes for part in formed)
        if size:
            with self._counting:
                self.formed = self.formed.and_one(size, time.perf_counter() - begun)

    def _formed(self, weight: str, compute: str, touched: bool, part: int) -> torch.Tensor:
        begun = time.perf_counter()
        try:
            found = library.file_part(self._handle, weight, part, compute, touched)
        except RuntimeError as error:
            raise translated(error) from None
        if not touched:
            self._note([found], begun)
        return found

    def gather(self, stacks: Iterable[Entry]) -> None:
        """Gives stacks of matrices addresses, where each matrix is read when it is touched. To be
        said once, before an engine is opened.

        Raises InvalidArgument for matrices that the file has in a form that a stack cannot have.
        """
        described = [
            {
                "name": entry.name,
                "storage": entry.resting.key,
                "shape": entry.shape,
                "matrices": [[p.name for p in pieces] for pieces in entry.by_index()],
            }
            for entry in stacks
        ]
        try:
            gathered = library.file_stacks(self._handle, json.dumps(described))
        except RuntimeError as error:
            raise translated(error) from None
        library.file_close(self._handle)
        self._handle = gathered

    def stack_parts(self, entry: Entry) -> list[torch.Tensor]:
        """The parts of a stack that was gathered, as they rest."""
        layout = entry.resting.layout(entry.shape)
        found = (library.file_stack_part(self._handle, entry.name, i) for i in range(len(layout)))
        pairs = zip(found, layout, strict=True)
        return [part.view(dtype).reshape(shape) for part, (_, dtype, shape) in pairs]

    def size(self, entry: Entry) -> int:
        return sum(self._tensors[member]["bytes"] for member in entry.members)

    def extents(self, entry: Entry) -> list[Extent]:
        return [Extent(self._handle, m, self._tensors[m]["bytes"]) for m in entry.members]

    def drop(self, entry: Entry) -> None:
        for member in entry.members:
            library.file_drop(self._handle, member)

    @property
    def handle(self) -> int:
        """The file as ops name it, until close()."""
        return self._handle

    def check(self) -> None:
        try:
            library.file_check(self._handle)
        except RuntimeError as error:
            raise translated(error) from None

    def verify(self) -> int:
        try:
            return int(library.file_verify(self._handle))
        except RuntimeError as error:
            raise translated(error) from None

    def share(self) -> None:
        """One more owner will close it."""
        self._owners += 1

    def close(self) -> None:
        self._owners -= 1
        if self._owners == 0:
            library.file_close(self._handle)


class Wholes:
    """Parts of entries. Those of a tensor that several take rows of are put in order once, and let
    go with the last that takes some."""

    def __init__(self, source: Source, every: Iterable[Entry]) -> None:
        self._source = source
        self._left = Counter(entry.cut.whole for entry in every if entry.cut is not None)
        self._found: dict[tuple[str, torch.dtype, bool], list[torch.Tensor]] = {}

    def parts(self, entry: Entry, compute: torch.dtype, touched: bool) -> list[torch.Tensor]:
        """As `Source.parts` says; of a run of rows views of those of the whole."""
        if entry.cut is None:
            return self._source.parts(entry, compute, touched)
        assert entry.storage is not None
        whole, known = entry.cut.whole, (entry.cut.whole, compute, touched)
        if known not in self._found:
            self._found[known] = self._source.parts(entry.whole, compute, touched)
        parts = entry.cut.parts(self._found[known], entry.storage)
        self._left[whole] -= 1
        if self._left[whole] <= 0:
            self._found = {key: kept for key, kept in self._found.items() if key[0] != whole}
        return parts


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether torch can use this mapped memory as it lies there."""
    return tensor.data_ptr() % tensor.dtype.itemsize == 0


@dataclass(frozen=True)
class Extent:
    """A tensor of an open file."""

    file: int  # as ops name it
    name: str
    bytes: int
    mapped: bool = True  # and read there


@dataclass
class Prefetch:
    """Advice only: what cannot be had is an error of whoever reads it. As a context, it ends with
    the block; the files must be open until then."""

    extents: Sequence[Extent]
    _used: int = 0
    _stopped: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Prefetch:
        self._ends: list[int] = list(accumulate(extent.bytes for extent in self.extents))
        self._thread = threading.Thread(target=self._run, name="stowage-ahead", daemon=True)
        self._thread.start()
        self._drop_behind()
        return self

    def __exit__(self, *raised: object) -> None:
        library.file_drop_behind(-1, "")
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def use(self, count: int) -> None:
        """So many bytes more have been read, by this thread."""
        with self._changed:
            self._used += count
            self._changed.notify()
        self._drop_behind()

    def _large(self) -> Extent | None:
        """What is being read, where pages of it must not wait until it has been."""
        current = bisect.bisect_right(self._ends, self._used)
        extent = self.extents[current] if current < len(self.extents) else None
        return extent if extent is not None and extent.mapped and extent.bytes > _PIECE else None

    def _drop_behind(self) -> None:
        extent = self._large()  # our ops drop it as they read, torch's know nothing of it
        if extent is None:
            library.file_drop_behind(-1, "")
        else:
            library.file_drop_behind(extent.file, extent.name)

    def _run(self) -> None:
        asked = 0
        for extent in self.extents:
            for begin in range(0, extent.bytes, _PIECE):
                size = min(_PIECE, extent.bytes - begin)
                if not self._wait(asked + size):
                    return
                asked += size
                library.file_populate(extent.file, extent.name, begin, size, extent.mapped)
                if extent.mapped:
                    library.file_drop(extent.file, extent.name)
        self._wait(math.inf)

    def _wait(self, asked: float) -> bool:
        """Until `asked` bytes lie within the window; False when all is over."""
        while True:
            with self._changed:
                if self._stopped or asked - self._used <= WINDOW:
                    return not self._stopped
                self._changed.wait(_SWEEP)
                extent = self._large()
            if extent is not None:
                library.file_drop(extent.file, extent.name)


@contextmanager
def reading(
    source: Source, entries: Sequence[tuple[Entry, bool]], progress: bool
) -> Iterator[Callable[[Entry], None]]:
    """Gives what to call when an entry has been read; `entries` are those that will be, and whether
    where they are mapped."""
    sizes = {entry.name: source.size(entry) for entry, _ in entries}
    listeners: list[Callable[[int], object]] = []
    with ExitStack() as stack:
        each = ((mapped, x) for entry, mapped in entries for x in source.extents(entry))
        if extents := [replace(extent, mapped=mapped) for mapped, extent in each]:
            listeners.append(stack.enter_context(Prefetch(extents)).use)
        if progress and sys.stderr is not None and sys.stderr.isatty():
            from tqdm import tqdm  # type: ignore[import-untyped]  # 2 MiB that few loads need

            total = sum(sizes.values())
            bar = tqdm(total=total, unit="B", unit_scale=True, desc="loading", delay=_SOON)
            listeners.append(stack.enter_context(bar).update)

        def done(entry: Entry) -> None:
            for listener in listeners:
                listener(sizes.get(entry.name, 0))

        yield done

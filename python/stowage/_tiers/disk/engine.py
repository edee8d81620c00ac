# SPDX-License-Identifier: Apache-2.0
"""The engine behind a model whose weights rest on a disk: what it may hold, what it is told of the
order of use, and what it counted. The weights themselves are mapped from the file; ops find the
engine by their addresses."""

from __future__ import annotations

import json
import math
import tempfile
import threading
import time
import weakref
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stowage._files.names import Entry
from stowage._files.sources import FileSource
from stowage._model.sizes import memory
from stowage._model.weights import Held
from stowage._ops import library
from stowage._ops.eager import eagerly
from stowage._ops.errors import InvalidArgument, raise_problems, translated
from stowage._ops.memory import copies_made, copy_with, new_copy
from stowage._tiers.counts import EngineReport, WeightUses, added
from stowage._tiers.disk.journal import (
    Journal,
    Written,
    forget_places,
    move_written,
    note_places,
    written_bytes,
)
from stowage._tiers.disk.routing import attach_routing, forget_following, is_listed
from stowage._tiers.forks import Living

WORKERS = 8
READS = ("automatic", "mapped", "buffered", "direct")
_ATTRIBUTE = "_stowage_engine"
_NOTHING = (0,) * 12 + (0.0, 0.0)  # counted
LEAST_SLICE = 16384  # bytes: a smaller matrix is not worth pages, reads and an entry of its own


@dataclass(frozen=True)
class EngineOptions:
    """What the caller says of an engine: see `stowage.offload`."""

    ram: int  # bytes
    reads: str = "automatic"
    workers: int = WORKERS
    timeout: float | None = None  # seconds
    lock: bool = False
    route_ahead: bool = False  # routers are asked about the input of the layer before
    keep: tuple[str, ...] = ()  # names in the file of what stays in memory, the most valuable first
    keep_by_model: bool = False  # or names of the model
    in_file: tuple[tuple[str, str], ...] = ()  # then those in the file, by these
    ring: int = 0  # bytes for the rest
    beside: int = 0  # bytes of ram that others of the model's weights take, always
    mapped_only: tuple[str, ...] = ()  # names in the file of what never comes into memory
    by_rows: tuple[tuple[str, int], ...] = ()  # names in the file of what comes by so many rows

    def problems(self) -> list[str]:
        """Why no engine can be made with these."""
        problems = []
        if self.reads not in READS:
            problems.append(f"reads must be one of {', '.join(READS)}, got {self.reads!r}")
        workers, timeout = self.workers, self.timeout
        if isinstance(workers, bool) or not isinstance(workers, int) or not 0 <= workers <= 256:
            problems.append(f"workers must be 0 to 256, got {workers!r}")
        elif timeout is not None and (
            isinstance(timeout, bool)
            or not isinstance(timeout, int | float)
            or not 0 < timeout < math.inf
        ):
            problems.append(f"timeout must be seconds above 0, or None, got {timeout!r}")
        elif timeout is not None and workers == 0:
            problems.append(f"timeout must come with workers, got {timeout} s with none")
        if self.route_ahead and workers == 0:
            problems.append("route_ahead must come with workers, got none")
        if self.lock and self.reads == "mapped":
            problems.append("lock must come with reads into memory, got reads='mapped'")
        return problems


class Engine:
    """An engine of the core, over the file of `source`. Ends with the last model that has it."""

    def __init__(self, source: FileSource, options: EngineOptions) -> None:
        raise_problems("stowage", options.problems())
        self.path, self.ram, self._options = source.where, options.ram, options
        if options.beside and options.beside >= options.ram:
            raise InvalidArgument(
                f"stowage: ram must hold {options.beside} bytes of weights that stay in memory, "
                f"and the largest that rests in the file, got {options.ram}"
            )
        self._opened: list[int] = []  # the one handle in use: close() must see the latest
        self._written = Written()
        self._source, self._share = source, self._room()
        self._began = time.perf_counter()
        self._counted: EngineReport | None = None  # by the handles before
        self._order: list[str] = []
        self._foreseen = ""  # uses of slices, as the op takes them
        self._used: dict[str, WeightUses] = {}  # by the handles before
        self._lock = threading.Lock()
        self._seen: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._open(options.reads)
        self._places: set[int] = set()  # addresses of parts in the file
        self._journal, self._copied = Journal(Path(self.path), Path(tempfile.gettempdir())), 0
        self._most_written = self._most_for_writes()
        _engines.add(self)
        source.share()
        weakref.finalize(self, _close, self._opened, self._source)

    @property
    def routes_ahead(self) -> bool:
        return self._options.route_ahead

    def _open(self, reads: str) -> None:
        try:
            given = self._options
            handle = library.engine_open(
                self._source.handle,
                self._share,
                reads,
                given.workers,
                given.timeout or 0.0,
                given.lock,
                json.dumps(given.mapped_only),
                json.dumps(dict(given.by_rows)),
            )
        except RuntimeError as error:
            problem = translated(error)
            if given.beside:
                problem = type(problem)(
                    f"{problem}, beside {given.beside} bytes of weights that stay in memory"
                )
            raise problem from None
        self._opened.append(handle)
        self._is_here = True
        facts = self._described()
        self._reads: str = facts["reads"]
        self._least: int = facts["largest"]  # no budget may be below
        keep = _matrices_of(_named(self._options), self._source.entries.values())
        if keep:
            library.engine_keep(handle, json.dumps(keep), self._share, self._options.ring)
        if self._order:
            self.expect(self._order)
        if self._foreseen:
            library.engine_foresee(handle, self._foreseen)

    def _room(self) -> int:
        """Bytes of memory for what lies in the file."""
        written = self._written.total
        return self.ram - self._options.beside - written

    def _most_for_writes(self) -> int:
        return min(self.ram // 2, self.ram - self._options.beside - self._least)

    def _described(self) -> dict[str, Any]:
        described: dict[str, Any] = json.loads(
            library.text(library.engine_describe(self._opened[-1]))
        )
        return described

    def expect(self, names: Iterable[str]) -> None:
        """The order of use to begin with, names of the file; another one is learnt from use."""
        self._order = list(names)
        if self._is_here:
            library.engine_expect(self._opened[-1], json.dumps(self._order))

    def foresee(self, by_index: Mapping[str, Sequence[int]]) -> None:
        """How often each matrix of stacks was used elsewhere, by name in the file. Raises
        InvalidArgument where that is of other stacks, or the engine was used already."""
        given = json.dumps({name: list(counts) for name, counts in by_index.items()})
        with self._lock:
            if not self._is_here:
                raise InvalidArgument(
                    "stowage.foresee: must be said in the process that made the engine, or after "
                    "rebudget, got it in a forked one"
                )
            try:
                library.engine_foresee(self._opened[-1], given)
            except RuntimeError as error:
                raise translated(error) from None
            self._foreseen = given

    def uses(self) -> dict[str, WeightUses]:
        """What became of the uses of each weight."""
        with self._lock:
            return self._uses()

    def _uses(self) -> dict[str, WeightUses]:
        if not self._is_here:
            return dict(self._used)
        told = json.loads(library.text(library.engine_uses(self._opened[-1])))
        now = {
            name: WeightUses._make((*counts, tuple(by_index)))
            for name, (*counts, by_index) in told.items()
        }
        return added(self._used, now)

    def places(self, weights: Iterable[torch.Tensor]) -> None:
        """Weights that lie in the file."""
        self._places.update(part.data_ptr() for weight in weights for part in memory(weight))

    def set_signature(self, signature: int) -> None:
        with self._lock:
            if self._is_here:
                library.engine_signature(self._opened[-1], signature)

    def settle(self, model: nn.Module) -> None:
        """Counts the weights of `model` that have left the file in the budget: what they take, the
        engine gives back, up to a half. What is more goes to the journal, whose pages are given
        back."""
        with self._lock:
            self._journal.drop()
            if self._is_settled(model):
                return
            self._seen[model], self._copied = copies_made(), 0
            most = self._most_written - self._written.beside(model)
            move_written(model, most, self._journal.copy)
            self._written.put(model, written_bytes(model))
            share = self._room()
            if share != self._share and self._is_here:
                self._reopen(share)

    def copy_out(self, part: torch.Tensor) -> torch.Tensor:
        """A copy of a part that lies in the file, to be written to: in memory while there is room
        for it in the budget."""
        with self._lock:
            self._copied += part.nbytes
            if self._written.total + self._copied <= self._most_written:
                return new_copy(part)
            self._copied -= part.nbytes
            return self._journal.copy(part)

    def leave_to_parent(self) -> None:
        """In a forked child the engine's threads do not exist, and its memory is not there: weights
        are read through the mapping, and the system keeps of the file what it can, until `rebudget`
        makes an engine of the child's own."""
        self._lock = threading.Lock()  # some thread of the parent may have had it
        self._is_here, self._reads = False, "mapped"
        self._counted, self._used, self._began = None, {}, time.perf_counter()

    def is_shared(self, part: torch.Tensor) -> bool:
        """Whether a part that was written to is another process's too."""
        return self._journal.is_shared(part)

    def holds(self, part: torch.Tensor) -> bool:
        """Whether a part lies in the file."""
        return part.data_ptr() in self._places

    def _is_settled(self, model: nn.Module) -> bool:
        """Whether nothing was copied out of any file since `settle`, and no copy of the model is
        gone."""
        if self._seen.get(model) != copies_made():
            return False
        return not self._is_here or self._share == self._room()

    def rebudget(self, ram: int, keep: tuple[str, ...], ring: int) -> None:
        """Another budget from now on; leases that are held end in the old one. Raises
        InvalidArgument where it is below the largest weight, and nothing has changed."""
        with self._lock:
            written, beside = self._written.total, self._options.beside
            if ram - written - beside < self._least:
                spread = f", those that stay in memory, {beside}" if beside else ""
                raise InvalidArgument(
                    f"stowage: ram must hold the largest weight, {self._least} bytes{spread}, and "
                    f"those that were written to, {written}, got {ram}"
                )
            self.ram, self._options = ram, replace(self._options, ram=ram, keep=keep, ring=ring)
            self._most_written = self._most_for_writes()
            self._reopen(self._room())

    def _reopen(self, share: int) -> None:
        reads = self._reads if self._is_here else self._options.reads
        self._counted = self._total()
        self._used = self._uses()
        while self._opened:  # a child may have begun without one
            library.engine_close(
                self._opened.pop()
            )  # leases stay good; ops read the mapping meanwhile
        self._share = share
        self._open(reads)

    def report(self) -> EngineReport:
        with self._lock:
            return self._total()

    def _total(self) -> EngineReport:
        counts = library.engine_counts(self._opened[-1]) if self._is_here else _NOTHING
        if self._is_here and self._reads == "direct":  # a disk may refuse the first such read
            self._reads = self._described()["reads"]
        seconds = time.perf_counter() - self._began
        more = (self._written.total, self._journal.bytes, seconds, 0.0, None)
        now = EngineReport._make((self._reads, *counts, *more))
        return now if self._counted is None else self._counted.then(now)

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        return self  # copies of a model share the file and the memory

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a pickled model has its bytes with it


def _close(opened: list[int], source: FileSource) -> None:
    for handle in opened:
        library.engine_close(handle)
    source.close()


def suited(options: EngineOptions, source: FileSource, moved: Mapping[str, Held]) -> EngineOptions:
    """The options for a file, of which `moved`, by name there, rests in it."""
    pieces = [e for e in source.entries.values() if e.place is not None and e.place.stack in moved]
    in_stacks = {entry.name for entry in pieces}
    own = tuple((held.name, name) for name, held in moved.items())
    return replace(
        options,
        in_file=own if options.keep_by_model else (),
        mapped_only=_mapped_only(source.entries, moved, in_stacks),
        by_rows=_by_rows(source, moved),
    )


def _named(options: EngineOptions) -> tuple[str, ...]:
    """What is kept, by names in the file."""
    in_file = dict(options.in_file)

    def named(name: str) -> str:
        weight, bracket, index = name.partition("[")
        return in_file.get(weight, weight) + bracket + index

    return tuple(map(named, options.keep))


def _matrices_of(names: Sequence[str], entries: Iterable[Entry]) -> tuple[str, ...]:
    """The names, with those of the matrices of stacks, "stack[3]", in the place of the tensors that
    these are made of; a matrix of which some tensors are not named is left out."""
    wanted: dict[str, set[str]] = {}  # by matrix
    of: dict[str, str] = {}
    for entry in entries:
        if entry.place is None:
            continue
        of[entry.name] = matrix = f"{entry.place.stack}[{entry.place.index}]"
        wanted.setdefault(matrix, set()).add(entry.name)
    named = set(names)
    made = {matrix for matrix, parts in wanted.items() if parts <= named}
    found = (of.get(name, name) for name in names if name not in of or of[name] in made)
    return tuple(dict.fromkeys(found))


def _mapped_only(
    entries: Mapping[str, Entry], moved: Mapping[str, Held], in_stacks: Container[str]
) -> tuple[str, ...]:
    """Of all names in a file but those `in_stacks`, the ones that need no room in memory. Rows of
    codes in another order are not read through the mapping."""

    def needs_room(name: str, entry: Entry) -> bool:
        if name not in moved or entry.is_converted:
            return False
        return entry.is_formed(0) or not moved[name].gives_rows

    room = {entry.whole.name for name, entry in entries.items() if needs_room(name, entry)}
    every = dict.fromkeys(entry.whole.name for entry in entries.values())
    return tuple(name for name in every if name not in room and name not in in_stacks)


def _by_rows(source: FileSource, moved: Mapping[str, Held]) -> tuple[tuple[str, int], ...]:
    """Of all names in a file, those of stacks each of whose matrices comes by itself; and of the
    weights of experts that are modules of a list, which come at once, but as those matrices do: as
    a router says, and no order."""

    def rows(name: str, entry: Entry) -> int:
        if name not in moved or not entry.lies_whole:
            return 0
        if is_listed(moved[name]):
            return entry.shape[0] if source.size(entry) >= LEAST_SLICE else 0
        if not moved[name].is_stack or not entry.gives_indices:
            return 0
        return 1 if source.size(entry) >= LEAST_SLICE * entry.shape[0] > LEAST_SLICE else 0

    every = ((name, rows(name, entry)) for name, entry in source.entries.items())
    return tuple((name, count) for name, count in every if count != 0)


def signature_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """A number for the kind of a model's inputs."""
    given = [*args, *kwargs.values()]
    facts = tuple((*t.shape, str(t.dtype)) for t in given if isinstance(t, torch.Tensor))
    return hash((facts, torch.is_grad_enabled())) & (2**63 - 1)


class _Signature:
    """A forward pre-hook of the whole model: orders of use are learnt for each kind of input."""

    def __init__(self, engine: Engine | None) -> None:
        self._engine = engine

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._engine is None or torch.compiler.is_compiling():
            return
        eagerly(self._begin, self._engine, module, args, kwargs)

    @staticmethod
    def _begin(
        engine: Engine, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        engine.settle(module)
        engine.set_signature(signature_of(args, kwargs))


_Signature.__module__ = "stowage._tiers.engine"  # pickles name it


_engines = Living(after_in_child=Engine.leave_to_parent)


def _copy_out(part: torch.Tensor) -> torch.Tensor:
    engine = next((engine for engine in _engines if engine.holds(part)), None)
    return new_copy(part) if engine is None else engine.copy_out(part)


def _is_shared(part: torch.Tensor) -> bool:
    return any(engine.is_shared(part) for engine in _engines)


copy_with(_copy_out, _is_shared)


def attach(model: nn.Module, engine: Engine, moved: Iterable[Held]) -> None:
    """`moved`: the weights that rest in the engine's file from now on."""
    every = list(moved)
    note_places(every)
    sites = [held.sites[0] for held in every]
    engine.places(getattr(site.module, site.attribute) for site in sites)
    hook = model.register_forward_pre_hook(_Signature(engine), with_kwargs=True)
    routing = attach_routing(every, ahead=engine.routes_ahead)
    model.__dict__[_ATTRIBUTE] = engine
    model.__dict__[_ATTRIBUTE + "_hooks"] = [hook, *routing]


def detach(model: nn.Module) -> None:
    for hook in model.__dict__.pop(_ATTRIBUTE + "_hooks"):
        hook.remove()
    forget_following(model)
    forget_places(model)
    model.__dict__.pop(_ATTRIBUTE)  # the engine ends with the last copy of the model that has it


def engine_of(model: nn.Module) -> Engine | None:
    found: Engine | None = model.__dict__.get(_ATTRIBUTE)
    return found

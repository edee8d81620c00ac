# SPDX-License-Identifier: Apache-2.0
"""The engine behind a model whose weights rest on a disk: what it may hold, what it is told of the
order of use, and what it counted. The weights themselves are mapped from the file; ops find the
engine by their addresses."""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stowage import ops
from stowage._errors import InvalidArgument, raise_problems, translated
from stowage._files.source import FileSource
from stowage._mapped import copies_made
from stowage._model.weights import Held
from stowage._tiers.counting import EngineReport
from stowage._tiers.writes import forget_places, note_places, written_bytes

WORKERS = 4
READS = ("automatic", "mapped", "buffered", "direct")
_ATTRIBUTE = "_stowage_engine"


@dataclass(frozen=True)
class EngineOptions:
    """What the caller says of an engine: see `stowage.offload`."""

    ram: int  # bytes
    reads: str = "automatic"
    workers: int = WORKERS


class Engine:
    """An engine of the core, over the file of `source`. Ends with the last model that has it."""

    def __init__(self, source: FileSource, options: EngineOptions) -> None:
        raise_problems("stowage", engine_problems(options.reads, options.workers))
        self.path, self.ram = source.where, options.ram
        self._workers, self._least = options.workers, source.largest()
        self._opened: list[int] = []  # the one handle in use: close() must see the latest
        self._source, self._share = source, self.ram
        self._began, self._counted = time.perf_counter(), EngineReport()
        self._order: list[str] = []
        self._lock, self._seen = threading.Lock(), copies_made()
        self._written: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._open(options.reads)
        source.share()
        weakref.finalize(self, _close, self._opened, self._source)

    def _open(self, reads: str) -> None:
        try:
            handle = ops.engine_open(self._source.handle, self._share, reads, self._workers)
        except RuntimeError as error:
            raise translated(error) from None
        self._opened.append(handle)
        if self._order:
            self.expect(self._order)

    def expect(self, names: Iterable[str]) -> None:
        """The order of use to begin with, names of the file; another one is learnt from use."""
        self._order = list(names)
        ops.engine_expect(self._opened[-1], json.dumps(self._order))

    def set_signature(self, signature: int) -> None:
        with self._lock:
            ops.engine_signature(self._opened[-1], signature)

    def settle(self, model: nn.Module) -> None:
        """Counts the weights of `model` that have left the file in the budget: what they take, the
        engine gives back, down to the room for its largest weight."""
        with self._lock:
            self._seen = copies_made()
            self._written[model] = written_bytes(model)
            share = max(min(self.ram, self._least), self.ram - sum(self._written.values()))
            if share == self._share:
                return
            self._counted = self._total()
            ops.engine_close(self._opened.pop())  # leases stay good; ops read the mapping meanwhile
            self._share = share
            self._open(self._counted.reads)

    def is_settled(self) -> bool:
        """Whether nothing was copied out of any file since `settle`."""
        return self._seen == copies_made()

    def report(self) -> EngineReport:
        with self._lock:
            return self._total()

    def _total(self) -> EngineReport:
        facts = json.loads(ops.text(ops.engine_describe(self._opened[-1])))
        now = EngineReport(**facts)
        seconds = time.perf_counter() - self._began
        return self._counted.then(now, written=sum(self._written.values()), seconds=seconds)

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        return self  # copies of a model share the file and the memory

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a pickled model has its bytes with it


def _close(opened: list[int], source: FileSource) -> None:
    for handle in opened:
        ops.engine_close(handle)
    source.close()


class _Signature:
    """A forward pre-hook of the whole model: orders of use are learnt for each kind of input."""

    def __init__(self, engine: Engine | None) -> None:
        self._engine = engine

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._engine is None or torch.compiler.is_compiling():
            return
        if not self._engine.is_settled():
            self._engine.settle(module)
        given = [*args, *kwargs.values()]
        facts = tuple((*t.shape, str(t.dtype)) for t in given if isinstance(t, torch.Tensor))
        self._engine.set_signature(hash((facts, torch.is_grad_enabled())) & (2**63 - 1))


def attach(model: nn.Module, engine: Engine, moved: Iterable[Held]) -> None:
    """`moved`: the weights that rest in the engine's file from now on."""
    note_places(moved)
    hook = model.register_forward_pre_hook(_Signature(engine), with_kwargs=True)
    model.__dict__[_ATTRIBUTE] = engine
    model.__dict__[_ATTRIBUTE + "_hook"] = hook


def detach(model: nn.Module) -> None:
    model.__dict__.pop(_ATTRIBUTE + "_hook").remove()
    forget_places(model)
    model.__dict__.pop(_ATTRIBUTE)  # the engine ends with the last copy of the model that has it


def engine_of(model: nn.Module) -> Engine | None:
    found: Engine | None = model.__dict__.get(_ATTRIBUTE)
    return found


def engine_report(model: nn.Module) -> EngineReport:
    """What the engine of an offloaded model did since `offload` or `load(ram=)`, and with
    `.since(earlier)` since an earlier report: of one pass, say.

    Raises InvalidArgument for a model that has none.
    """
    engine = engine_of(model)
    if engine is None:
        raise InvalidArgument(
            "stowage.engine_report: the model must be offloaded (stowage.offload, or stowage.load "
            "with ram=), got one that is not"
        )
    engine.settle(model)
    return engine.report()


def engine_problems(reads: str, workers: int = WORKERS) -> list[str]:
    """Why an engine cannot be made with these."""
    problems = []
    if reads not in READS:
        problems.append(f"reads must be one of {', '.join(READS)}, got {reads!r}")
    if isinstance(workers, bool) or not isinstance(workers, int) or not 0 <= workers <= 256:
        problems.append(f"workers must be 0 to 256, got {workers!r}")
    return problems

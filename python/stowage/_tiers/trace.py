# SPDX-License-Identifier: Apache-2.0
"""`trace`: what offloaded models did when, as a file for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
import os
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from stowage._ops import library
from stowage._ops.eager import eagerly
from stowage._ops.errors import translated
from stowage._tiers.counts import EngineReport
from stowage._tiers.disk.engine import Engine, engine_of
from stowage._tiers.disk.journal import has_places


@contextmanager
def trace(path: str | os.PathLike[str], most_events: int = 1 << 20) -> Iterator[None]:
    """Writes what offloaded models did in the block, as a file for Perfetto or chrome://tracing.

    Each forward of a model, and of each module in it that has weights on the disk, is a span of its
    thread: "compute". Inside it, and wherever else weights are used (in compiled graphs, backward),
    "use" is the time that an op had a weight, "wait" the time that it waited for it, and "read" is
    a piece of a weight that comes, on the thread that fetches it. Bytes read and held are counters.

    Args:
        path: the JSON file, written when the block ends.
        most_events: events of engines that are kept; of more the last are dropped, and a warning
            says so.

    Returns:
        A context manager.

    Raises:
        InvalidArgument: inside another trace.
        OSError: the file cannot be written.

    Example:
        >>> stowage.offload(model, ram="64KiB", folder="weights")
        >>> with stowage.trace("pass.json"):
        ...     y = model(x)
    """
    try:
        library.trace_start(most_events)
    except RuntimeError as error:
        raise translated(error) from None
    recorder = _Recorder()
    before = register_module_forward_pre_hook(recorder.enter)
    after = register_module_forward_hook(recorder.leave, always_call=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()
        traced = json.loads(library.text(library.trace_stop()))
        traced["traceEvents"] += recorder.events
        if traced["dropped"]:
            text = f"stowage: the trace had no room for {traced['dropped']} events"
            warnings.warn(text, stacklevel=3)
        with open(path, "w", encoding="utf-8") as file:
            json.dump(traced, file)


class _Recorder:
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._local = threading.local()
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()

    def enter(self, module: nn.Module, args: object) -> None:
        if not torch.compiler.is_compiling():
            eagerly(self._enter, module)

    def _enter(self, module: nn.Module) -> None:
        stack = self._stack()
        engine = engine_of(module)
        if engine is not None:
            for name, part in module.named_modules():
                self._names[part] = name or type(module).__name__
        elif stack and has_places(module):
            engine = stack[-1].engine
        if engine is not None:
            stack.append(_Span(module, engine, time.perf_counter(), engine.report()))

    def leave(self, module: nn.Module, args: object, result: object) -> None:
        if not torch.compiler.is_compiling():
            eagerly(self._leave, module)

    def _leave(self, module: nn.Module) -> None:
        stack = self._stack()
        if not stack or stack[-1].module is not module:
            return
        span = stack.pop()
        now = time.perf_counter()
        done = span.engine.report()
        once = done.since(span.report)
        facts = {"uses": once.acquired, "misses": once.misses, "late": once.late}
        self._event("X", self._names.get(module, ""), span.start, cat="compute", args=facts,
                    dur=(now - span.start) * 1e6)  # fmt: skip
        self._event("C", "bytes read", now, args={"bytes": done.bytes_read})
        self._event("C", "bytes held", now, args={"bytes": done.held})

    def _event(self, kind: str, name: str, at: float, **facts: Any) -> None:
        where = {"pid": os.getpid(), "tid": threading.get_native_id()}
        self.events.append({"ph": kind, "name": name, "ts": at * 1e6, **where, **facts})

    def _stack(self) -> list[_Span]:
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        stack: list[_Span] = self._local.stack
        return stack


class _Span:
    """A forward that runs."""

    __slots__ = ("engine", "module", "report", "start")

    def __init__(
        self, module: nn.Module, engine: Engine, start: float, report: EngineReport
    ) -> None:
        self.module, self.engine, self.start, self.report = module, engine, start, report

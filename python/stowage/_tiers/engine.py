# SPDX-License-Identifier: Apache-2.0
"""The engine behind a model whose weights rest on a disk: what it may hold, what it is told of the
order of use, and what it counted. The weights themselves are mapped from the file; ops find the
engine by their addresses."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stowage import ops
from stowage._errors import InvalidArgument, translated
from stowage._files.source import FileSource

WORKERS = 4
READS = ("automatic", "mapped", "buffered", "direct")
_ATTRIBUTE = "_stowage_engine"


@dataclass(frozen=True)
class EngineReport:
    """What an engine did since it was made; see `stowage.engine_report`."""

    reads: str  #: how bytes come: mapped, buffered or direct
    acquired: int  #: uses of weights: hits + misses + late + borrowed
    hits: int  #: were in memory
    misses: int  #: were read while the model waited
    late: int  #: were being read ahead, and waited for
    borrowed: int  #: read through the mapping: no room, and the thread used another weight
    ahead: int  #: reads that were begun before the weight was used
    evicted: int
    bytes_read: int
    held: int  #: bytes in memory now
    peak: int  #: bytes in memory at most; never more than the budget
    stall: float  #: seconds that the model waited for weights

    def __str__(self) -> str:
        use = max(self.acquired, 1)
        return (
            f"{self.reads} reads: {self.acquired} uses, {self.hits / use:.0%} in memory, "
            f"{self.late / use:.0%} late, {self.misses} missed; {self.bytes_read / 2**20:.1f} MiB "
            f"read, {self.stall:.3f} s waited; {self.held / 2**20:.1f} MiB held, at most "
            f"{self.peak / 2**20:.1f}"
        )


class Engine:
    """An engine of the core, over the file of `source`. Ends with the last model that has it."""

    def __init__(
        self, source: FileSource, ram: int, reads: str = "automatic", workers: int = WORKERS
    ) -> None:
        check_engine(reads, workers)
        try:
            self._handle = ops.engine_open(source.handle, ram, reads, workers)
        except RuntimeError as error:
            raise translated(error) from None
        self.path = source.where
        self.ram = ram
        self.made_plain: tuple[str, ...] = ()  # what onload() makes plain parameters again
        weakref.finalize(self, ops.engine_close, self._handle)

    def expect(self, names: Iterable[str]) -> None:
        """The order of use to begin with; another one is learnt from use."""
        ops.engine_expect(self._handle, json.dumps(list(names)))

    def set_signature(self, signature: int) -> None:
        ops.engine_signature(self._handle, signature)

    def report(self) -> EngineReport:
        return EngineReport(**json.loads(ops.engine_describe(self._handle)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        return self  # copies of a model share the file and the memory

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a pickled model has its bytes with it


class _Signature:
    """A forward pre-hook of the whole model: orders of use are learnt for each kind of input."""

    def __init__(self, engine: Engine | None) -> None:
        self._engine = engine

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._engine is None or torch.compiler.is_compiling():
            return
        given = [*args, *kwargs.values()]
        facts = tuple((*t.shape, str(t.dtype)) for t in given if isinstance(t, torch.Tensor))
        self._engine.set_signature(hash((facts, torch.is_grad_enabled())) & (2**63 - 1))


def attach(model: nn.Module, engine: Engine) -> None:
    hook = model.register_forward_pre_hook(_Signature(engine), with_kwargs=True)
    model.__dict__[_ATTRIBUTE] = engine
    model.__dict__[_ATTRIBUTE + "_hook"] = hook


def detach(model: nn.Module) -> None:
    model.__dict__.pop(_ATTRIBUTE + "_hook").remove()
    model.__dict__.pop(_ATTRIBUTE)  # the engine ends with the last copy of the model that has it


def engine_of(model: nn.Module) -> Engine | None:
    found: Engine | None = model.__dict__.get(_ATTRIBUTE)
    return found


def engine_report(model: nn.Module) -> EngineReport:
    """What the engine of an offloaded model did since `offload` or `load(ram=)`.

    Raises InvalidArgument for a model that has none.
    """
    engine = engine_of(model)
    if engine is None:
        raise InvalidArgument(
            "stowage.engine_report: the model must be offloaded (stowage.offload, or stowage.load "
            "with ram=), got one that is not"
        )
    return engine.report()


def check_engine(reads: str, workers: int) -> None:
    if reads not in READS:
        raise InvalidArgument(f"stowage: reads must be one of {', '.join(READS)}, got {reads!r}")
    if isinstance(workers, bool) or not isinstance(workers, int) or not 0 <= workers <= 256:
        raise InvalidArgument(f"stowage: workers must be 0 to 256, got {workers!r}")

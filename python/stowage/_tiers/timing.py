# SPDX-License-Identifier: Apache-2.0
"""The passes of a model that keeps to a plan, beside what the plan said: told once, when passes
repeat."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from torch import nn

from stowage._tiers.counting import EngineReport
from stowage._tiers.engine import Engine, engine_of, signature_of
from stowage.planning import Plan

_ATTRIBUTE = "_stowage_plan"
_logger = logging.getLogger("stowage")
_OFF, _LEAST = 0.15, 0.01  # of the planned time, and seconds: more is worth a warning


class Kept:
    """The plan that a model keeps to, until it has been compared with a pass."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._seen: set[int] = set()
        self._begun = 0.0
        self._before = EngineReport()
        self._told = False

    def begin(self, engine: Engine | None) -> None:
        if not self._told:
            self._before = EngineReport() if engine is None else engine.report()
            self._begun = time.perf_counter()

    def end(self, engine: Engine | None, signature: int) -> None:
        """A pass of inputs of this kind. The first of each kind learns the order, and is left
        out."""
        if self._told or signature not in self._seen:
            self._seen.add(signature)
            return
        self._told = True
        figures: dict[str, Any] = {"seconds": time.perf_counter() - self._begun}
        if engine is not None:
            once = engine.report().since(self._before)
            figures |= {"stall": once.stall, "bytes": {"disk->ram": once.bytes_read}}
        compared = self.plan.compare(figures)
        off = abs(compared.measured - compared.predicted)
        level = logging.WARNING if off > max(_OFF * compared.predicted, _LEAST) else logging.INFO
        rows = self.plan.facts["rows"]
        _logger.log(level, "stowage: a pass beside its plan, for %d rows: %s", rows, compared)

    def __deepcopy__(self, memo: dict[int, Any]) -> Kept:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a pickled model rests nowhere


class _Begin:
    def __init__(self, kept: Kept | None) -> None:
        self._kept = kept

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._kept is not None and not torch.compiler.is_compiling():
            self._kept.begin(engine_of(module))


class _End:
    def __init__(self, kept: Kept | None) -> None:
        self._kept = kept

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: object
    ) -> None:
        if self._kept is not None and not torch.compiler.is_compiling():
            self._kept.end(engine_of(module), signature_of(args, kwargs))


def keep_to(model: nn.Module, plan: Plan | None) -> None:
    """Notes the plan that `model` keeps to from now on, if it keeps to one."""
    if plan is None:
        return
    kept = Kept(plan)
    model.__dict__[_ATTRIBUTE] = kept
    model.__dict__[_ATTRIBUTE + "_hooks"] = [
        model.register_forward_pre_hook(_Begin(kept)),
        model.register_forward_hook(_End(kept), with_kwargs=True),
    ]


def forget_plan(model: nn.Module) -> None:
    model.__dict__.pop(_ATTRIBUTE, None)
    for hook in model.__dict__.pop(_ATTRIBUTE + "_hooks", ()):
        hook.remove()


def kept_plan(model: nn.Module) -> Kept | None:
    found: Kept | None = model.__dict__.get(_ATTRIBUTE)
    return found

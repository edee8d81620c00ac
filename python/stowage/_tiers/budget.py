# SPDX-License-Identifier: Apache-2.0
"""The budget of a model in use: `rebudget` sets another one, `keep_free` gives memory back when the
machine runs short of it."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from types import TracebackType

from torch import nn

from stowage._model.sizes import byte_count
from stowage._ops.errors import InvalidArgument, StowageError
from stowage._tiers.disk.engine import engine_of
from stowage._tiers.maps.budgets import available_ram
from stowage._tiers.plans.execution import carried_by_engine, forget_plan, keep_to, kept_plan

_LOG = logging.getLogger("stowage")
_STEP = 16  # a budget changes by a 16th of the whole one at least: each change reads weights again


def rebudget(model: nn.Module, ram: int | str) -> None:
    """Gives an offloaded model another budget of memory.

    Its weights stay where they are, and what is in memory by the new budget is read again when it
    is used. A model that keeps to a plan is planned anew within `ram`, with the rates of its plan:
    what saves least for its bytes goes first. Uses that are running end in the memory that they
    have, which is given back then.

    Args:
        model: a module whose weights rest on a disk.
        ram: bytes, or a text such as "1GiB".

    Raises:
        InvalidArgument: the model's weights do not rest on a disk, `ram` is below the largest
            weight, or no plan keeps it; nothing has changed then.

    Example:
        >>> stowage.offload(model, ram="64KiB", folder="weights")
        >>> stowage.rebudget(model, "32KiB")
        >>> model(x).shape
        torch.Size([2, 64])
    """
    engine = engine_of(model)
    if engine is None:
        raise InvalidArgument(
            "stowage.rebudget: the model must rest on a disk (stowage.offload, or stowage.load "
            "with ram= or plan=), got one that does not"
        )
    kept = kept_plan(model)
    if kept is None:
        engine.rebudget(byte_count(ram, "ram"), (), 0)
        return
    if kept.plan.facts["limits"]["accelerators"]:
        raise InvalidArgument(
            "stowage.rebudget: the plan must be without accelerators, got one with; onload the "
            "model and offload it by another plan"
        )
    plan = kept.plan.within(ram)
    how = carried_by_engine("stowage.rebudget", plan)
    engine.rebudget(how.ram, how.keep, how.ring)
    forget_plan(model)
    keep_to(model, plan)


def keep_free(
    model: nn.Module,
    free: int | str,
    *,
    least: int | str | None = None,
    every: float = 1.0,
    available: Callable[[], int] = available_ram,
) -> Keeper:
    """Keeps memory available to others by shrinking and growing an offloaded model's budget.

    It looks at what the machine and the container's limit have available. Where that is less than
    `free`, the budget shrinks by what is missing; where there is more again, it grows back, up to
    what it was. By a plan, what saves least for its bytes goes first (`stowage.rebudget`). Results
    do not change; passes read more. It ends with the model.

    Args:
        model: a module whose weights rest on a disk.
        free: bytes to keep available, or a text such as "2GiB".
        least: bytes of the smallest budget; without, an eighth of the one now, and never below
            what the model needs.
        every: seconds between two looks.
        available: another source of the bytes that are available.

    Returns:
        What watches: `stop()` ends it, as leaving it as a context manager does.

    Raises:
        InvalidArgument: the model's weights do not rest on a disk, or `every` is not above 0.

    Example:
        >>> stowage.offload(model, ram="64KiB", folder="weights")
        >>> with stowage.keep_free(model, "1GiB") as keeper:
        ...     y = model(x)
    """
    engine = engine_of(model)
    if engine is None:
        raise InvalidArgument(
            "stowage.keep_free: the model must rest on a disk (stowage.offload, or stowage.load "
            "with ram= or plan=), got one that does not"
        )
    if every <= 0:
        raise InvalidArgument(f"stowage.keep_free: every must be seconds above 0, got {every}")
    kept = kept_plan(model)
    most = engine.ram if kept is None else int(kept.plan.facts["limits"]["ram"])
    lowest = most // 8 if least is None else min(byte_count(least, "least"), most)
    return Keeper(model, byte_count(free, "free"), lowest, most, every, available)


class Keeper:
    """Watches from a thread. `ram` is the model's budget now, `changes` how often it changed."""

    def __init__(
        self,
        model: nn.Module,
        free: int,
        least: int,
        most: int,
        every: float,
        available: Callable[[], int],
    ) -> None:
        self.ram, self.changes = most, 0
        self._free, self._least, self._most = free, least, most
        self._every, self._available = every, available
        self._model = weakref.ref(model)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stowage keep_free", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """The budget stays as it is now."""
        self._over.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Keeper:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def look(self) -> None:
        """Looks now, and changes the budget if it must."""
        model = self._model()
        if model is None or engine_of(model) is None:
            self._over.set()
            return
        wanted, refused = self._wanted(self._available()), 0
        while wanted != self.ram:
            try:
                rebudget(model, wanted)
                _LOG.info("stowage.keep_free: budget of %s bytes instead of %s", wanted, self.ram)
                self.ram, self.changes = wanted, self.changes + 1
            except InvalidArgument as error:  # the model needs more than that
                _LOG.warning("stowage.keep_free: %s", error)
                refused = wanted
            wanted = self._between(refused) if refused else self.ram

    def _between(self, refused: int) -> int:
        """What to try after a budget was refused: halfway, until that is near enough."""
        half = (refused + self.ram) // 2
        if self.ram - half >= self._most // _STEP:
            return half
        self._least = self.ram
        return self.ram

    def _wanted(self, available: int) -> int:
        spare = available - self._free
        wanted = max(self._least, min(self._most, self.ram + spare))
        far = abs(wanted - self.ram) >= self._most // _STEP
        return wanted if far or wanted in (self._least, self._most) else self.ram

    def _watch(self) -> None:
        while not self._over.wait(self._every):
            try:
                self.look()
            except StowageError as error:
                _LOG.warning("stowage.keep_free: stopped: %s", error)
                return

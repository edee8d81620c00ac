# SPDX-License-Identifier: Apache-2.0
"""What one `quantized_init` keeps of the weights that are made in it: where, and how much of it."""

from __future__ import annotations

import weakref
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol

from stowage._ops import _torch
from stowage._ops.errors import InvalidArgument


class Owner(Protocol):
    """What is asked of an origin.Origin (of which this file knows no more)."""

    name: str
    place: str
    reserved: int
    home: Home
    is_finite: bool

    def close(self) -> None: ...

    def clear(self, how: str = "") -> None: ...


class Terms:
    """What one `quantized_init` keeps, where, and until when. Also knows which module is being
    initialised: the values of the one before are put where they stay, or dropped."""

    def __init__(
        self,
        keeps: bool,
        *,
        master_first: bool = False,
        budget: int | None = None,
        spill: Path | None = None,
        spill_budget: int | None = None,
    ) -> None:
        self.keeps, self.master_first = keeps, master_first
        self.budget, self.spill, self.spill_budget = budget, spill, spill_budget
        self.origins: weakref.WeakSet[Owner] = weakref.WeakSet()
        self._home: Home | None = None
        self._open: list[Owner] = []

    def place_for(self, nbytes: int) -> str:
        """ram or disk. Raises InvalidArgument, with nothing kept, where neither has room."""
        if not self.keeps:
            return "none"
        used = {"ram": 0, "disk": 0}
        for origin in self.origins:
            used[origin.place] = used.get(origin.place, 0) + origin.reserved
        if self.budget is None and self.spill is None:
            return "ram"
        if self.budget is not None and used["ram"] + nbytes <= self.budget:
            return "ram"
        room = None if self.spill_budget is None else self.spill_budget - used["disk"]
        if self.spill is not None and (room is None or nbytes <= room):
            return "disk"
        where = "budget" if self.spill is None else "spill_budget"
        limit, held = (
            (self.budget, used["ram"]) if self.spill is None else (self.spill_budget, used["disk"])
        )
        raise InvalidArgument(
            f"stowage: {where} must have room for {nbytes} more bytes of init values, got {limit} "
            f"bytes of which {held} are in use; raise it"
            + ("" if self.spill is not None else ", or give spill=folder")
        )

    def opens(self, origin: Owner) -> None:
        if self._home is not origin.home:
            self.close()
            self._home = origin.home
        self.keeps_open(origin)

    def keeps_open(self, origin: Owner) -> None:
        """Also one that an operator wrote together with those of another module."""
        if origin not in self._open:
            self._open.append(origin)

    def unfinished(self) -> list[str]:
        """Weights that have got values which are not finite."""
        return sorted(origin.name for origin in self.origins if not origin.is_finite)

    def close(self) -> None:
        opened, self._open, self._home = self._open, [], None
        for origin in opened:
            origin.close()


class Home:
    """One module's weights, as far as their origins go. As a hook before its forward it ends
    them."""

    def __init__(self) -> None:
        self.origins: weakref.WeakSet[Owner] = weakref.WeakSet()

    def __call__(self, module: Any, inputs: Any) -> None:
        for origin in list(self.origins):
            origin.clear('at the first forward, as until="first_forward" asked')
        for key, hook in list(_torch.pre_hooks(module).items()):
            if hook is self:
                del _torch.pre_hooks(module)[key]

    def __deepcopy__(self, memo: dict[int, Any]) -> Home:
        return memo.setdefault(id(self), Home())

    def __reduce__(self) -> tuple[Any, ...]:
        return Home, ()


_active: ContextVar[Terms | None] = ContextVar("stowage_quantized_init", default=None)


def activate(terms: Terms | None) -> Any:
    return _active.set(terms)


def deactivate(token: Any) -> None:
    _active.reset(token)


def active() -> Terms | None:
    return _active.get()

# SPDX-License-Identifier: Apache-2.0
"""The exact value that a trainable weight was initialised with, beside its resting form: one owner,
and one end.

A weight made inside `training.quantized_init` refers to an `Origin`, and so do its aliases and what
`Module._apply` makes of it: state of the tensor, not an attribute of the Parameter. Rows that FSDP2
gives a process have an Origin of their own, with the value of those rows.

What one `quantized_init` keeps of the weights that are made in it: where, and how much of it.
"""

from __future__ import annotations

import copy
import weakref
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stowage._model.rest.beside import Kept, keep
from stowage._ops import _torch
from stowage._ops.errors import InvalidArgument

KEPT, UNSET, ABSENT, TAKEN, CLEARED, INVALID = (
    "kept", "unset", "absent", "taken", "cleared", "invalid"
)  # fmt: skip
_WHY = {
    ABSENT: "none was kept: make the model in quantized_init(..., preserve_init=True)",
    UNSET: "it was never initialised: do so inside quantized_init, after to_empty()",
    TAKEN: "it was taken: take_init_value() moves it out once; keep what it gave",
    CLEARED: "it was cleared",
    INVALID: "the weight was written since (copy_, load_state_dict), so it is not its value any "
    "more: dequantize() gives what rests",
}


class Owned(Protocol):
    """What an Origin asks of the tensor that it belongs to."""

    device: torch.device
    dtype: torch.dtype
    shape: torch.Size

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor: ...


class Origin:
    """The exact value of one weight, or what became of it; and how often the weight was written."""

    def __init__(self, terms: Terms, home: Home, name: str, nbytes: int = 0) -> None:
        self.name = name
        self.place = terms.place_for(nbytes)
        self.reserved = nbytes
        self.state, self._why = (UNSET if terms.keeps else ABSENT), ""
        self.writes = 0
        self._value: Tensor | None = None  # exact, also while it is being initialised
        self._file: Kept | None = None
        self.is_finite, self._lent = True, False
        self._owner: tuple[weakref.ref[nn.Module], str] | None = None
        self.share = 0  # elements of the process that has most of them
        self._made_for: Any = None
        self._join(terms, home)

    def _join(self, terms: Terms, home: Home) -> None:
        self.terms, self.home = terms, home
        terms.origins.add(self)
        home.origins.add(self)

    # --- whose it is ---

    def owner(self) -> tuple[nn.Module | None, str]:
        """The module that holds the weight, and its name there."""
        if self._owner is None:
            return None, ""
        module, name = self._owner
        return module(), name

    def owned_by(self, module: nn.Module, name: str) -> None:
        self._owner = weakref.ref(module), name

    # --- who has it ---------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes that are kept now, wherever."""
        value = self._value if self._file is None else self._file
        return 0 if value is None else value.nbytes

    def get(self) -> Tensor:
        """The exact value: of one in memory the very tensor, else a copy that is read from disk.
        Raises InvalidArgument that says what became of it."""
        if self.state != KEPT:
            raise InvalidArgument(f"stowage: no init value: {self._why or _WHY[self.state]}")
        if self._value is not None:
            return self._value
        assert self._file is not None
        return self._file.read().clone()

    def lent(self) -> Tensor:
        """The value for one that will write to it after `clear`: the tensor itself, once."""
        value = self.get()
        if self._lent and self._value is not None:
            value = value.clone()
        self._lent = True
        return value

    def take(self, why: str = "") -> Tensor:
        value = self.get()
        value = value.clone() if self._lent and self._value is not None else value
        self._end(TAKEN, why)
        return value

    def clear(self, how: str = "") -> None:
        """Frees it. Nothing where there is none, so that it may be called twice."""
        if self.state in (KEPT, UNSET):
            self._end(CLEARED, f"it was cleared {how}" if how else "")

    def written(self) -> None:
        """The weight has got other values than those it was made from."""
        self.writes += 1
        if self.state in (KEPT, UNSET):
            self._end(INVALID, "")

    def _end(self, state: str, why: str) -> None:
        self.state, self._why = state, why
        self._value = self._file = None
        self.reserved = 0

    # --- while it is being initialised --------------------------------------------------------

    @property
    def initialising(self) -> bool:
        return active() is not None

    def shown(self, weight: Owned) -> Tensor | None:
        """What reads of the weight give inside the context: the exact value, where it is there."""
        if active() is None or self.state == UNSET:
            return None
        if self._file is not None and self.state == KEPT:
            return self._file.read()
        return self._value

    def opened(self, weight: Owned) -> Tensor | None:
        """The exact value for an in-place operator to write; None outside the context, and where
        the weight has no memory."""
        terms = active()
        if terms is None or weight.device.type == "meta":
            return None
        dtype = torch.float32 if terms.master_first else weight.dtype
        value = self._value
        if value is None and self.state == KEPT:
            value = self.get()
        elif value is None and self.state == UNSET:
            value = torch.empty(weight.shape, dtype=dtype, device=weight.device)
        elif value is None:
            value = weight.dequantize(dtype)
        if not self.reserved and terms.keeps:
            # Every process counts the largest share, so that all refuse or none does.
            nbytes = max(value.numel(), self.share) * dtype.itemsize
            self.place = terms.place_for(nbytes)
            self.reserved = nbytes
        self._join(terms, self.home)
        terms.opens(self)
        self._file = None
        self._value = value.detach().to(device=weight.device, dtype=dtype)
        return self._value

    def initialised(self, exact: Tensor) -> None:
        """The resting form has been made from `exact`, which is kept from now on."""
        self.state, self._why = (KEPT if self.terms.keeps else ABSENT), ""
        self._value = exact
        self.terms.keeps_open(self)
        nbytes = max(exact.numel(), self.share) * exact.itemsize
        self.reserved = nbytes if self.terms.keeps else 0

    def close(self) -> None:
        """Puts the value where it stays, or drops it."""
        value = self._value
        if value is None:
            return
        self.is_finite = _finite(value)
        if self.state != KEPT:
            self._value = None
        elif self.place == "disk":
            self._file = keep({"value": value.cpu()}, "disk", self.terms.spill)["value"]
            self._value = None
        elif not self.terms.master_first:
            self._value = value.cpu()

    # --- what goes along with the weight ------------------------------------------------------

    def unset(self) -> Origin:
        """Of the same weight in new memory without values, as `to_empty` gives it."""
        made = _bare(self)
        made.state = UNSET if self.terms.keeps else ABSENT
        made._made_for, made.share = weakref.ref(self), self.share
        return made

    def made_for(self) -> Origin | None:
        """That of the weight which the memory of this one is to hold."""
        return self._made_for and self._made_for()

    def at(self, device: torch.device) -> Origin:
        """Of the weight on another device: the same; on meta, where nothing has values, unset."""
        return self.unset() if device.type == "meta" else self

    def of_rows(self, first: int, last: int, share: int = 0) -> Origin:
        """Of rows [first, last), which one process has: with a value of its own. `share` is the
        number of elements that the process has which has most."""
        made = _bare(self)
        made.state, made._why = self.state, self._why
        made._made_for, made.share = weakref.ref(self), share
        if self.state == KEPT:
            value = self.get()[first:last].clone()
            made.place, made.reserved = self.place, value.nbytes
            made._value = value
            made.close()
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Origin:
        made = _bare(self, copy.deepcopy(self.home, memo))
        module, name = self.owner()
        if module is not None and id(module) in memo:  # which is being copied around it
            made.owned_by(memo[id(module)], name)
        made.state, made._why, made.writes = self.state, self._why, self.writes
        made.place, made.reserved = self.place, self.reserved
        made._file = self._file
        made._value = None if self._value is None else self._value.clone()
        return memo.setdefault(id(self), made)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # pickles leave it out


def _finite(values: Tensor) -> bool:
    """Without a mask as large as the values."""
    return not values.numel() or bool(torch.stack(torch.aminmax(values)).isfinite().all())


def _bare(like: Origin, home: Home | None = None) -> Origin:
    made = Origin.__new__(Origin)
    made.name, made.place, made.reserved, made.writes = like.name, like.place, 0, 0
    made.state, made._why = ABSENT, ""
    made._value, made._file, made.is_finite, made._lent = None, None, True, False
    made._made_for, made.share, made._owner = None, 0, like._owner
    made._join(like.terms, like.home if home is None else home)
    return made


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


Home.__module__ = "stowage.training.terms"  # pickles name it

_active: ContextVar[Terms | None] = ContextVar("stowage_quantized_init", default=None)


def activate(terms: Terms | None) -> Any:
    return _active.set(terms)


def deactivate(token: Any) -> None:
    _active.reset(token)


def active() -> Terms | None:
    return _active.get()

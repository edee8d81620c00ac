# SPDX-License-Identifier: Apache-2.0
"""The tier of a device: a ring of its memory, allocated once, into which units (a weight's codes
and scales, in their resting form) are fetched when ops use them, and prefetched in the order of
use, which is learnt for each signature of a model's inputs. A unit takes a place in the ring where
those that are used last must leave for it."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from stowage._ops import _torch
from stowage._ops.errors import OutOfMemory, Unsupported
from stowage._tiers.counts import DeviceReport
from stowage._tiers.device.link import Link, offsets
from stowage._tiers.forks import Living

_STEPS = 1024  # of the expected order that are looked at
_FAR = 1e9  # steps to the next use of a unit that is not expected


def _aliases(parts: Sequence[Tensor]) -> list[Tensor]:
    with torch.inference_mode(False):
        return [part.detach() for part in parts]


Facts = tuple[tuple[Any, ...], ...]


def _version(part: Tensor) -> int | None:
    return None if part.is_inference() else _torch.version(part)


def facts_of(parts: Sequence[Tensor]) -> Facts:
    """What changes whenever the bytes, or the way to see them, may have changed."""
    return tuple((*_place(p), p.nbytes, p.dtype, tuple(p.shape), _version(p)) for p in parts)


def _place(part: Tensor) -> tuple[int, int]:
    return _torch.cdata(part.untyped_storage()), int(part.storage_offset())


def unit_bytes(parts: Iterable[Tensor]) -> int:
    """Bytes that a unit takes in a ring."""
    return offsets(parts)[-1]


@dataclass(eq=False)
class _Unit:
    """A weight. It keeps aliases of its parts, so that no others get their memory."""

    parts: list[Tensor]
    here: list[Tensor] = field(default_factory=list)  # over the ring
    is_here: bool = False  # has a slot; that it is not known here lets tiers end without cycles
    facts: Facts = ()  # of the bytes in the ring
    ready: Any = None  # event of the copy
    has_ended: bool = False  # as somebody has seen
    users: int = 0
    used: dict[int, Any] = field(default_factory=dict)  # last event of each stream's work with it
    stamp: int = 0  # of the last use


class DeviceTier:
    """Lends the parts of a model's weights on `device`, out of a ring of `budget` bytes, which is
    all that it ever allocates there. `weights` gives the parts of each, in the order of the model,
    and whether the whole of it is used."""

    def __init__(
        self,
        device: torch.device,
        budget: int,
        weights: Callable[[], list[tuple[list[Tensor], bool]]],
    ) -> None:
        self.device, self.budget = device, budget
        with torch.inference_mode(False), torch.no_grad():
            self._ring = torch.empty(budget, dtype=torch.uint8, device=device)
        self._link = Link(device)
        # What the next copy must come after; all later ones do. The memory was somebody's before.
        self._after = [self._link.mark(self._link.current())]
        self._weights = weights
        self._order = UseOrder()
        self._units: dict[Hashable, _Unit] = {}
        self._slots: list[RingSlot[_Unit]] = []
        self._storages: set[int] = set()
        self._window = 0  # bytes of look-ahead
        self._lock = threading.RLock()
        self._freed = threading.Condition(self._lock)
        self._clock = 0
        self._report = {"uses": 0, "hits": 0, "misses": 0, "late": 0, "ahead": 0, "evicted": 0}
        self._report |= {"bytes_copied": 0, "peak": 0}
        self._stall = 0.0
        weakref.finalize(self, Link.finish, self._link)
        _tiers.add(self)

    def holds(self, codes: Tensor) -> bool:
        return _torch.cdata(codes.untyped_storage()) in self._storages

    def refresh(self) -> None:
        with self._lock:
            found = self._weights()
            self._storages = {
                _torch.cdata(p.untyped_storage()) for parts, _ in found for p in parts
            }
            for key, unit in list(self._units.items()):
                if not self.holds(unit.parts[0]) and not unit.users:  # its aliases keep memory
                    self._leave(unit)
                    del self._units[key]
            sizes = [unit_bytes(parts) for parts, whole in found if whole]
            self._window = max(self.budget // 4, 2 * max(sizes, default=0))
            self._order.expect([self._known(parts) for parts, whole in found if whole])

    def set_signature(self, signature: int) -> None:
        with self._lock:
            self._order.set_signature(signature)

    def report(self) -> DeviceReport:
        with self._lock:
            facts = {**self._report, "held": self._held(), "ring": self.budget}
            return DeviceReport(device=str(self.device), stall=self._stall, **facts)

    @contextmanager
    def lend(self, parts: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        if self._link.is_captured():
            yield self._captured(list(parts))
            return
        unit, stream = self._take(list(parts)), self._link.current()
        try:
            if unit.ready is not None:
                stream.wait_event(unit.ready)  # on the device
            yield unit.here
        finally:
            self._give_back(unit, stream)

    def leave_threads(self) -> None:
        """In a forked child: no other thread has the lock, or uses a unit."""
        self._lock = threading.RLock()
        self._freed = threading.Condition(self._lock)
        for unit in self._units.values():
            unit.users = 0

    def _captured(self, parts: list[Tensor]) -> list[Tensor]:
        """Of a weight whose place a graph will read whenever it runs: nothing may cross meanwhile,
        and no other weight may ever get that place."""
        with self._lock:
            unit = self._units[self._known(parts)]
            stays = len(self._slots) == len(self._units)
            if not stays or not self._is_here(unit, facts_of(parts)):
                raise Unsupported(
                    "stowage: a graph must be captured with all weights in the ring on "
                    f"{self.device}, got {len(self._slots)} of {len(self._units)} in "
                    f"{self.budget} bytes; accelerator= must hold "
                    f"{sum(unit_bytes(unit.parts) for unit in self._units.values())} for them, and "
                    "the model must have run before"
                )
            if unit.ready is not None and not unit.has_ended:  # while capturing nobody can look
                raise Unsupported(
                    "stowage: a graph must be captured when all copies have ended; run the model "
                    "twice before, and synchronize"
                )
            return unit.here

    # --- under the lock -----------------------------------------------------------------------

    def _known(self, parts: list[Tensor]) -> Hashable:
        key = (*_place(parts[0]), parts[0].nbytes)
        if key not in self._units:
            self._units[key] = _Unit(_aliases(parts))
        return key

    def _held(self) -> int:
        return sum(slot.end - slot.begin for slot in self._slots)

    def _take(self, parts: list[Tensor]) -> _Unit:
        facts = facts_of(parts)
        with self._lock:
            key = self._known(parts)
            unit = self._units[key]
            self._order.note(key)
            self._clock += 1
            self._report["uses"] += 1
            begin = time.perf_counter()
            missed = False
            while not self._is_here(unit, facts):
                missed = True
                if not unit.users and self._fetch(unit, _aliases(parts), facts, None):
                    break
                self._wait_for_room(parts)
            late = not missed and unit.ready is not None and not unit.ready.query()
            unit.has_ended = not missed and not late
            self._report["misses" if missed else "late" if late else "hits"] += 1
            if missed:
                self._stall += time.perf_counter() - begin
            unit.users += 1
            unit.stamp = self._clock
            return unit

    def _is_here(self, unit: _Unit, facts: Facts) -> bool:
        known = all(fact[-1] is not None for fact in facts)  # else a write would not be seen
        return unit.is_here and unit.facts == facts and (known or unit.users > 0)

    def _wait_for_room(self, parts: list[Tensor]) -> None:
        if not any(slot.unit.users for slot in self._slots):
            raise OutOfMemory(
                f"stowage: the ring on {self.device} must hold a weight of {unit_bytes(parts)} "
                f"bytes, got one of {self.budget}"
            )
        self._freed.wait()

    def _fetch(
        self, unit: _Unit, parts: list[Tensor], facts: Facts, nearer_than: float | None
    ) -> bool:
        """Gives `unit` its bytes where there is room; to look ahead, only in place of units whose
        next use is farther than `nearer_than` steps."""
        self._leave(unit)
        distances = self._distances()
        window = best_window(
            self._slots, self.budget, unit_bytes(parts), lambda u: self._distance(u, distances)
        )
        if window is None:
            return False
        leaving = [slot.unit for slot in window.leaving]
        far = [self._distance(u, distances) or 0 for u in leaving]
        if nearer_than is not None and far and min(far) <= nearer_than:
            return False
        for other in leaving:
            self._report["evicted"] += 1
            self._leave(other)
        self._copy(unit, parts, facts, window.begin)
        return True

    def _copy(self, unit: _Unit, parts: list[Tensor], facts: Facts, begin: int) -> None:
        places = offsets(parts)
        end = begin + places[-1]
        with torch.inference_mode(False), torch.no_grad():
            there = self._ring[begin:end]
            unit.here = [
                there[at : at + part.nbytes].view(part.dtype).view(part.shape)
                for at, part in zip(places, parts, strict=False)
            ]
            unit.ready = self._link.copy(parts, there, self._after)
        self._after, unit.parts, unit.facts = [], parts, facts
        unit.is_here = True
        self._slots.append(RingSlot(begin, end, unit))
        self._slots.sort(key=lambda slot: slot.begin)
        self._report["bytes_copied"] = self._link.crossed
        self._report["peak"] = max(self._report["peak"], self._held())

    def _leave(self, unit: _Unit) -> None:
        """Takes the unit's place from it, to be written to after the work that used it."""
        if not unit.is_here:
            return
        self._slots = [slot for slot in self._slots if slot.unit is not unit]
        self._after += unit.used.values()
        unit.is_here, unit.here, unit.facts, unit.ready, unit.used = False, [], (), None, {}
        unit.has_ended = False

    def _distances(self) -> dict[int, int]:
        expected = self._order.ahead(2 * len(self._slots) + 8)
        return {id(self._units[k]): i for i, k in enumerate(expected) if k in self._units}

    def _distance(self, unit: _Unit, expected: dict[int, int]) -> float | None:
        if unit.users:
            return None
        return expected.get(id(unit), _FAR + self._clock - unit.stamp)

    def _give_back(self, unit: _Unit, stream: Any) -> None:
        with self._lock:
            unit.users = max(unit.users - 1, 0)  # it was lent before a fork
            if stream is not None:  # in the lock, so that of two threads' events the later is kept
                unit.used[stream.stream_id] = self._link.mark(stream)
            self._freed.notify_all()
            if self._link.stream is not None:  # without streams, a copy ahead is only a copy
                self._look_ahead()

    def _look_ahead(self) -> None:
        """Begins the copies of what is expected next: only so far ahead that copies go on beside
        the work, for what is fetched earlier takes the place of others that could have stayed."""
        if len(self._slots) == len(self._units):
            return
        ahead = 0
        for steps, key in enumerate(self._order.ahead(_STEPS)):
            unit = self._units.get(key)
            if unit is None:
                continue
            ahead += unit_bytes(unit.parts)
            if steps and ahead > self._window:
                return
            if unit.is_here:
                continue
            facts = facts_of(unit.parts)
            if any(fact[-1] is None for fact in facts):
                continue
            try:
                if not self._fetch(unit, unit.parts, facts, float(steps)):
                    return
            except RuntimeError:  # whoever uses the unit will have the error
                return
            self._report["ahead"] += 1


_tiers = Living(after_in_child=DeviceTier.leave_threads)


T = TypeVar("T")


@dataclass(frozen=True)
class RingSlot(Generic[T]):
    """Bytes [begin, end) that `unit` has."""

    begin: int
    end: int
    unit: T


@dataclass(frozen=True)
class Window(Generic[T]):
    """Bytes from `begin` on that are free once `leaving` have left."""

    begin: int
    leaving: tuple[RingSlot[T], ...]


def best_window(
    slots: Sequence[RingSlot[T]],
    total: int,
    size: int,
    distance: Callable[[T], float | None],
) -> Window[T] | None:
    """The window of `size` bytes in a ring of `total` whose units are farthest from their next use.

    `slots` are in order. `distance` says how far a unit's next use is, None that it must stay. Of
    windows that are equally far the one with fewest bytes leaving is taken. None where every window
    has a unit that must stay.
    """
    far = [distance(slot.unit) for slot in slots]
    best: tuple[float, int] | None = None
    found: Window[T] | None = None
    for first in range(len(slots) + 1):
        begin = slots[first - 1].end if first else 0
        last, nearest, bytes_leaving = first, float("inf"), 0
        while (slots[last].begin if last < len(slots) else total) - begin < size:
            distant = far[last] if last < len(slots) else None
            if distant is None:
                break
            nearest = min(nearest, distant)
            bytes_leaving += slots[last].end - slots[last].begin
            last += 1
        else:
            value = (nearest, -bytes_leaving)
            if best is None or value > best:
                best, found = value, Window(begin, tuple(slots[first:last]))
    return found


_MOST = 1 << 16  # pairs that are remembered; then all are learnt anew


class UseOrder:
    """What came before the current unit tells a forward pass from a backward one, so the pair of
    both leads to the next. A guess may be wrong."""

    def __init__(self) -> None:
        self._next: dict[tuple[Hashable, Hashable, Hashable], Hashable] = {}
        self._told: dict[Hashable, Hashable] = {}
        self._signature: Hashable = None
        self._before: Hashable = None
        self._now: Hashable = None

    def expect(self, order: Iterable[Hashable]) -> None:
        """The order to begin with; its end leads to its beginning."""
        given = list(order)
        self._told = dict(zip(given, given[1:] + given[:1], strict=True))

    def set_signature(self, signature: Hashable) -> None:
        self._signature = signature

    def note(self, unit: Hashable) -> None:
        """`unit` is used now."""
        if len(self._next) > _MOST:
            self._next.clear()
        for signature in (self._signature, None):  # None: of any, for signatures that are new
            self._next[signature, self._before, self._now] = unit
        self._before, self._now = self._now, unit

    def ahead(self, most: int) -> Iterator[Hashable]:
        """What is expected next, nearest first, each once, at most `most` steps ahead. The unit in
        use comes where it is used again."""
        before, now = self._before, self._now
        seen: set[Hashable] = set()
        for _ in range(most):
            after = self._next.get((self._signature, before, now))
            if after is None:
                after = self._next.get((None, before, now), self._told.get(now))
            if after is None:
                return
            if after not in seen:
                seen.add(after)
                yield after
            before, now = now, after

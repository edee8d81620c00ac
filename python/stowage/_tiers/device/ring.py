# SPDX-License-Identifier: Apache-2.0
"""The tier of a device: a ring of its memory, allocated once, into which units (a weight's codes
and scales, in their resting form) are fetched when ops use them, and prefetched in the order of
use, which is learnt for each signature of a model's inputs. A unit takes a place in the ring where
those that are used last must leave for it.

Of stacks [E, O, K] each matrix is a unit, of which nobody expects an order: whoever multiplies says
which ones come (`want`), and those leave that are used least, or, where most of a stack is used, as
by a prompt, in turn."""

from __future__ import annotations

import threading
import time
import weakref
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stowage._ops import _torch
from stowage._ops.errors import OutOfMemory, Unsupported
from stowage._tiers.counts import DeviceReport
from stowage._tiers.device.link import Link, offsets
from stowage._tiers.device.shares import Shares
from stowage._tiers.device.use_order import UseOrder
from stowage._tiers.device.windows import RingSlot, best_window
from stowage._tiers.forks import Living

_STEPS = 1024  # of the expected order that are looked at
_FAR = 1e9  # steps to the next use of a unit that is not expected
_NEAR = 0.5  # and of a matrix, of which those of its size have no more than their share


def _aliases(parts: Sequence[Tensor]) -> list[Tensor]:
    with torch.inference_mode(False):
        return [part.detach() for part in parts]


Facts = tuple[tuple[Any, ...], ...]
Place = tuple[int, int]  # a storage, and an offset in it
PartsOf = Callable[[Any, int], list[Tensor] | None]  # of a stack, one matrix of it


def _version(part: Tensor) -> int | None:
    return None if part.is_inference() else _torch.version(part)


def facts_of(parts: Sequence[Tensor]) -> Facts:
    """What changes whenever the bytes, or the way to see them, may have changed."""
    return tuple((*_place(p), p.nbytes, p.dtype, tuple(p.shape), _version(p)) for p in parts)


def _place(part: Tensor) -> Place:
    return _torch.cdata(part.untyped_storage()), int(part.storage_offset())


def unit_bytes(parts: Iterable[Tensor]) -> int:
    """Bytes that a unit takes in a ring."""
    return offsets(parts)[-1]


@dataclass(eq=False)
class _Unit:
    """A weight. It keeps aliases of its parts, so that no others get their memory."""

    parts: list[Tensor]
    size: int  # bytes that it takes in a ring
    is_matrix: bool  # of a stack
    here: list[Tensor] = field(default_factory=list)  # over the ring
    is_here: bool = False  # has a slot; that it is not known here lets tiers end without cycles
    begin: int = 0  # of the slot
    facts: Facts = ()  # of the bytes in the ring
    ready: Any = None  # event of the copy
    has_ended: bool = False  # as somebody has seen
    users: int = 0
    used: dict[int, Any] = field(default_factory=dict)  # last event of each stream's work with it
    stamp: int = 0  # of the last use


class Rests(NamedTuple):
    """A weight of the model."""

    parts: list[Tensor]
    is_expected: bool  # the whole of it, in its turn
    room: int  # bytes that all of it takes in a ring
    matrix: int  # bytes of one matrix of a stack, which are used one by one; else 0


class DeviceTier:
    """Lends the parts of a model's weights on `device`, out of a ring of `budget` bytes, which is
    all that it ever allocates there. `weights` gives those weights, in the order of the model."""

    def __init__(
        self,
        device: torch.device,
        budget: int,
        weights: Callable[[], list[Rests]],
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
        self._weights_in: dict[int, list[Rests]] = {}  # by the storage of their codes
        # By the codes of a stack, those of the next and a tensor over them: a weak reference to the
        # weight itself would be in the way of torch's swap_tensors.
        self._following: dict[Place, tuple[Place, Tensor]] = {}
        self._matrices: dict[Place, dict[int, _Unit]] = {}  # by the codes of their stack, and index
        self._wanted: tuple[Place, list[int]] | None = None  # codes of a stack, and which of it
        self._coming: set[int] = set()  # ids of units that are here and were wanted since
        self._in_turn = False  # most of a stack was wanted
        self._shares: Shares[_Unit] = Shares()  # of matrices
        self._held = 0  # bytes
        self.has_room = False  # for all weights
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
                _torch.cdata(part.untyped_storage()) for rests in found for part in rests.parts
            }
            self._weights_in = {}
            for rests in found:
                self._weights_in.setdefault(_place(rests.parts[0])[0], []).append(rests)
            self._share_out(found)
            stacks = {_place(rests.parts[0]) for rests in found if rests.matrix}
            self._following = {
                key: (after, stack)
                for key, (after, stack) in self._following.items()
                if key in stacks and after in stacks
            }
            self._matrices = {k: u for k, u in self._matrices.items() if k in stacks}
            for key, unit in list(self._units.items()):
                if not self.holds(unit.parts[0]) and not unit.users:  # its aliases keep memory
                    self._leave(unit)
                    if unit.is_matrix:
                        self._shares.forget(unit)
                    del self._units[key]
            self.has_room = sum(rests.room for rests in found) <= self.budget
            expected = [rests.parts for rests in found if rests.is_expected]
            self._window = max(self.budget // 4, 2 * max(map(unit_bytes, expected), default=0))
            self._order.expect([self._known(parts) for parts in expected])

    def set_signature(self, signature: int) -> None:
        with self._lock:
            self._order.set_signature(signature)

    def report(self) -> DeviceReport:
        with self._lock:
            facts = {**self._report, "held": self._held, "ring": self.budget}
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

    def want(
        self, stack: Tensor, codes: Tensor, indices: list[int], parts_of: PartsOf
    ) -> list[int] | None:
        """Those matrices of a stack come next: the copies begin of what is not here, as far as
        there is room; then of the same matrices of the stack that came after this one before. The
        same matrices, first those whose copies have ended; None of what is no stack."""
        with self._lock:
            of = self._weight_of(codes)
            if of is None or not of.matrix:
                return None
            if self._link.stream is None or not indices:  # without streams, a copy is waited for
                return indices
            key = _place(codes)
            every = self._matrices_of(key, stack, indices, parts_of)
            if len(every) < len(indices):  # blocks that reach over several: it comes whole
                return indices
            comes = {i: not self._has_come(u) for i, u in zip(indices, every, strict=True)}
            if self._wanted is not None:
                before, same = self._wanted[0], self._wanted[1] == indices
                if not same or before == key:
                    self._following.pop(before, None)
                elif before not in self._following or self._following[before][0] != key:
                    self._following[before] = (key, stack.detach())
            self._wanted = (key, indices)
            self._coming.clear()
            self._in_turn = 2 * len(indices) >= of.room // of.matrix
            following = self._following.get(key)
            if self._begin_copies(every) and following is not None:
                self._begin_copies(self._matrices_of(*following, indices, parts_of))
            return sorted(indices, key=comes.__getitem__)

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
            stays = self.has_room and len(self._slots) == len(self._units)
            if not stays or not self._is_here(unit, self._facts(unit, parts)):
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
            of = self._weight_of(parts[0])
            is_matrix = of is not None and of.matrix > 0 and parts[0].nbytes < of.parts[0].nbytes
            self._units[key] = _Unit(_aliases(parts), unit_bytes(parts), is_matrix)
        return key

    def _weight_of(self, codes: Tensor) -> Rests | None:
        """Whose codes these are, or a slice of which."""
        storage, offset = _place(codes)
        for rests in self._weights_in.get(storage, ()):
            every = rests.parts[0]
            first = every.storage_offset() * every.itemsize
            if first <= offset * codes.itemsize <= first + every.nbytes - codes.nbytes:
                return rests
        return None

    def _take(self, parts: list[Tensor]) -> _Unit:
        with self._lock:
            key = self._known(parts)
            unit = self._units[key]
            facts = self._facts(unit, parts)
            self._clock += 1
            if unit.is_matrix:
                self._shares.use(unit)
                self._coming.discard(id(unit))
            else:
                self._order.note(key)
            self._report["uses"] += 1
            begin = time.perf_counter()
            missed = False
            while not self._is_here(unit, facts):
                missed = True
                if not unit.users and self._fetch(unit, _aliases(parts), facts, None):
                    break
                self._wait_for_room(parts)
            late = not missed and not self._has_come(unit)
            unit.has_ended = not missed and not late
            self._report["misses" if missed else "late" if late else "hits"] += 1
            if missed:
                self._stall += time.perf_counter() - begin
            unit.users += 1
            unit.stamp = self._clock
            return unit

    def _share_out(self, found: list[Rests]) -> None:
        """What whole weights leave of the ring, and a quarter of it at least, is for matrices."""
        rooms: dict[int, int] = {}
        for rests in found:
            if rests.matrix:
                rooms[rests.matrix] = rooms.get(rests.matrix, 0) + rests.room
        left = self.budget - sum(rests.room for rests in found if not rests.matrix)
        self._shares.give(max(left, self.budget // 4), rooms)

    def _facts(self, unit: _Unit, parts: list[Tensor]) -> Facts:
        """With the versions of the weight that the parts are of: slices that are made below
        autograd have versions of their own, which tell nothing. Those of matrices differ by who
        made them."""
        facts = facts_of(parts)
        of = self._weight_of(parts[0])
        if of is None:
            return facts
        versions = [_version(part) for part in of.parts]
        if not unit.is_matrix:
            versions += [fact[-1] for fact in facts]
        of_all = None if None in versions else tuple(versions)
        return tuple((*fact[:-1], of_all) for fact in facts)

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
        begin = self._place_of_matrix(unit.size, for_use=True) if unit.is_matrix else None
        if begin is None:
            begin = self._make_room(unit.size, nearer_than)
        if begin is None:
            return False
        self._copy(unit, parts, facts, begin)
        return True

    def _has_come(self, unit: _Unit) -> bool:
        return unit.is_here and (unit.has_ended or unit.ready is None or unit.ready.query())

    def _place_of_matrix(self, size: int, *, for_use: bool) -> int | None:
        """Where a matrix goes: as long as those of its size have less than their share, behind all
        that is here or in the place of weights that are used last; else in the place of one of its
        size. Of those that come next only `for_use`."""
        if self._shares.may_grow(size):
            end = self._slots[-1].end if self._slots else 0
            begin = end if end + size <= self.budget else self._make_room(size, _NEAR)
            if begin is not None:
                return begin
        choices = [lambda u: not u.users and id(u) not in self._coming, lambda u: not u.users]
        leaving = None
        for may_leave in choices[: 1 + for_use]:
            leaving = leaving or self._shares.leaving(size, may_leave, in_turn=self._in_turn)
        if leaving is None:
            return None
        self._report["evicted"] += 1
        begin = leaving.begin
        self._leave(leaving)
        return begin

    def _make_room(self, size: int, nearer_than: float | None) -> int | None:
        """Where `size` bytes are free, once those have left whose next use is farthest, and farther
        than `nearer_than` steps."""
        distances = self._distances()
        window = best_window(self._slots, self.budget, size, lambda u: self._distance(u, distances))
        if window is None:
            return None
        leaving = [slot.unit for slot in window.leaving]
        far = [self._distance(u, distances) or 0 for u in leaving]
        if nearer_than is not None and far and min(far) <= nearer_than:
            return None
        for other in leaving:
            self._report["evicted"] += 1
            self._leave(other)
        return window.begin

    def _matrices_of(
        self, key: Place, stack: Tensor, indices: list[int], parts_of: PartsOf
    ) -> list[_Unit]:
        """Of a stack whose codes are there. To slice one takes as long as a small product,
        so each is sliced once."""
        known = self._matrices.setdefault(key, {})
        found = []
        for index in indices:
            unit = known.get(index)
            if unit is None:
                parts = parts_of(stack, index)
                if parts is None:
                    return []
                unit = known[index] = self._units[self._known(parts)]
            found.append(unit)
        return found

    def _begin_copies(self, units: list[_Unit]) -> bool:
        """Of matrices that come next; False where there is no room but that of others of them."""
        self._coming.update(id(unit) for unit in units if unit.is_here)
        for unit in units:
            facts = self._facts(unit, unit.parts)
            if unit.users or self._is_here(unit, facts) or any(f[-1] is None for f in facts):
                continue
            self._leave(unit)
            begin = self._place_of_matrix(unit.size, for_use=False)
            if begin is None:
                return False
            try:
                self._copy(unit, unit.parts, facts, begin)
            except RuntimeError:  # whoever uses the unit will have the error
                return False
            self._coming.add(id(unit))
            self._report["ahead"] += 1
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
        unit.is_here, unit.begin = True, begin
        self._slots.insert(self._slot_at(begin), RingSlot(begin, end, unit))
        if unit.is_matrix:
            self._shares.come(unit)
        self._held += end - begin
        self._report["bytes_copied"] = self._link.crossed
        self._report["peak"] = max(self._report["peak"], self._held)

    def _slot_at(self, begin: int) -> int:
        return bisect_left(self._slots, begin, key=lambda slot: slot.begin)

    def _leave(self, unit: _Unit) -> None:
        """Takes the unit's place from it, to be written to after the work that used it."""
        if not unit.is_here:
            return
        slot = self._slots.pop(self._slot_at(unit.begin))
        self._held -= slot.end - slot.begin
        if unit.is_matrix:
            self._shares.leave(unit)
        self._after += unit.used.values()
        unit.is_here, unit.here, unit.facts, unit.ready, unit.used = False, [], (), None, {}
        unit.has_ended = False

    def _distances(self) -> dict[int, int]:
        expected = self._order.ahead(2 * len(self._slots) + 8)
        return {id(self._units[k]): i for i, k in enumerate(expected) if k in self._units}

    def _distance(self, unit: _Unit, expected: dict[int, int]) -> float | None:
        if unit.users:
            return None
        if unit.is_matrix and self._shares.is_within(unit):
            return _NEAR / 2 if id(unit) in self._coming else _NEAR
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
            ahead += unit.size
            if steps and ahead > self._window:
                return
            if unit.is_here:
                continue
            facts = self._facts(unit, unit.parts)
            if any(fact[-1] is None for fact in facts):
                continue
            try:
                if not self._fetch(unit, unit.parts, facts, float(steps)):
                    return
            except RuntimeError:  # whoever uses the unit will have the error
                return
            self._report["ahead"] += 1


_tiers = Living(after_in_child=DeviceTier.leave_threads)

# SPDX-License-Identifier: Apache-2.0
"""The books of a device's ring: which window a unit gets, and what is expected next."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from stowage._tiers.device.link import padded
from stowage._tiers.device.ring import RingSlot, UseOrder, best_window


def oracle(
    slots: list[RingSlot[int]], total: int, size: int, far: dict[int, float | None]
) -> object:
    """The best that any set of neighbours gives: nearest use of who leaves, bytes that leave."""
    best = None
    for first, last in combinations(range(len(slots) + 1), 2):
        leaving = slots[first:last]
        if any(far[slot.unit] is None for slot in leaving):
            continue
        begin = slots[first - 1].end if first else 0
        end = slots[last].begin if last < len(slots) else total
        if end - begin >= size:
            uses = [far[slot.unit] or 0.0 for slot in leaving]
            value = (min(uses, default=float("inf")), -sum(s.end - s.begin for s in leaving))
            best = value if best is None else max(best, value)
    for at in range(len(slots) + 1):
        begin = slots[at - 1].end if at else 0
        end = slots[at].begin if at < len(slots) else total
        if end - begin >= size:
            best = (float("inf"), 0)
    return best


@pytest.mark.parametrize("seed", range(200))
def test_the_best_window(seed: int) -> None:
    chance = random.Random(seed)
    slots: list[RingSlot[int]] = []
    at = 0
    while at < 40:
        at += chance.choice([0, 0, 1, 3])
        end = at + chance.randint(1, 6)
        slots.append(RingSlot(at, end, len(slots)))
        at = end
    total, size = at + chance.choice([0, 2]), chance.randint(1, 12)
    far = {s.unit: chance.choice([None, 1.0, 5.0, 9.0, 20.0]) for s in slots}
    found = best_window(slots, total, size, far.__getitem__)
    wanted = oracle(slots, total, size, far)
    if found is None:
        assert wanted is None
        return
    kept = [s for s in slots if s not in found.leaving]
    assert all(s.end <= found.begin or found.begin + size <= s.begin for s in kept)
    assert found.begin >= 0 and found.begin + size <= total
    uses = [far[s.unit] or 0.0 for s in found.leaving]
    value = (min(uses, default=float("inf")), -sum(s.end - s.begin for s in found.leaving))
    assert value == wanted


def test_padded() -> None:
    assert [padded(n) for n in (0, 1, 256, 257)] == [0, 256, 256, 512]


def ahead(order: UseOrder, most: int = 20) -> list[object]:
    return list(order.ahead(most))


def test_the_order_is_learnt_forward_and_backward() -> None:
    order = UseOrder()
    order.expect("abcd")
    order.note("a")
    assert ahead(order) == ["b", "c", "d", "a"]
    for _ in range(2):
        for unit in "abcddcba":
            order.note(unit)
    order.note("a")
    order.note("b")
    assert ahead(order, 2) == ["c", "d"]
    for unit in "cddc":
        order.note(unit)
    assert ahead(order, 2) == ["b", "a"]  # backward


def test_orders_of_signatures() -> None:
    order = UseOrder()
    for signature, units in ((1, "abc"), (2, "acb")):
        order.set_signature(signature)
        for unit in units * 3:
            order.note(unit)
    order.set_signature(1)
    for unit in "ca":
        order.note(unit)
    assert ahead(order, 1) == ["b"]
    order.set_signature(2)
    assert ahead(order, 1) == ["c"]


def test_what_is_learnt_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stowage._tiers.device.use_order._MOST", 10)
    order = UseOrder()
    for i in range(1000):
        order.note(i)
    assert len(order._next) <= 12

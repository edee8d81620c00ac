# SPDX-License-Identifier: Apache-2.0
"""Which unit of a ring leaves for another."""

from __future__ import annotations

from stowage._tiers.device.reuse import Reuse


class Unit:
    users = 0


def test_what_was_used_least_leaves() -> None:
    reuse: Reuse[Unit] = Reuse(64)
    often, once, never, lent = (Unit() for _ in range(4))
    for unit in (never, often, once, lent):
        reuse.come(unit)
    for unit in (often, often, often, once):
        reuse.use(unit)
    lent.users = 1

    def least() -> Unit | None:
        return reuse.least(lambda unit: not unit.users)

    assert least() is never
    reuse.leave(never)
    assert least() is once
    for _ in range(40):  # what is used now counts, and what was used long ago no more
        reuse.use(once)
    assert least() is often
    reuse.forget(often)
    once.users = 1
    assert least() is None
    reuse.forget(once)
    every = [Unit() for _ in range(8)]
    for unit in every:
        reuse.come(unit)
    for unit in (*every, every[0]):
        reuse.use(unit)
    assert reuse.latest(lambda unit: unit is not lent) is every[7]  # of the last two the first
    assert reuse.latest(lambda unit: unit is every[3]) is every[3]
    for unit in every:
        reuse.forget(unit)
    for _ in range(200):  # what has left is not kept in mind
        other = Unit()
        reuse.come(other)
        assert least() is other
        reuse.forget(other)
    assert len(reuse._ranks) < 100

# SPDX-License-Identifier: Apache-2.0
"""Which of its options each weight takes, so that all together fit a number of bytes and their
costs add up to the least. Knows numbers only.

A price for each byte that makes the cheapest options just fit gives a first answer and a bound that
no answer beats. The search then keeps, weight by weight, every state (bytes, cost) that no other
state beats in both and that can still beat the first answer: exact as long as there are fewer than
the cap, which twelve weights with three options never reach. Beyond it, states are thinned to the
best and the smallest of equal slices of the bytes. Nothing depends on chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_EXACT_UNITS = 12
_EXACT_STATES = 1 << 20
_STATES = 1 << 14


@dataclass(frozen=True)
class Option:
    """One way for a weight to rest."""

    size: int  # bytes
    cost: float  # finite, not negative


Picks = tuple[int, ...]  # one index of an option for each weight


def cheapest(units: Sequence[Sequence[Option]]) -> Picks:
    """The option of fewest bytes for each weight, of least cost among those."""
    return tuple(
        min(range(len(options)), key=lambda i: (options[i].size, options[i].cost, i))
        for options in units
    )


def size_of(units: Sequence[Sequence[Option]], picks: Picks) -> int:
    return sum(options[pick].size for options, pick in zip(units, picks, strict=True))


def cost_of(units: Sequence[Sequence[Option]], picks: Picks) -> float:
    return sum(options[pick].cost for options, pick in zip(units, picks, strict=True))


def best(
    units: Sequence[Sequence[Option]], limit: int, also: Sequence[Picks] = (), states: int = 0
) -> Picks | None:
    """One option for each weight: sizes add up to at most `limit` and costs to the least; None
    where nothing fits. Never worse than a member of `also` that fits. `states` overrides the cap.
    """
    if size_of(units, cheapest(units)) > limit:
        return None
    cap = states or (_EXACT_STATES if len(units) <= _EXACT_UNITS else _STATES)
    price, priced = _price(units, limit)
    known = [p for p in also if size_of(units, p) <= limit]
    known.append(_filled(units, priced, limit))
    first = min(cost_of(units, picks) for picks in known)
    found = [_filled(units, p, limit) for p in _search(units, limit, cap, price, first)] + known
    return min(found, key=lambda picks: (cost_of(units, picks), size_of(units, picks)))


def _priced(units: Sequence[Sequence[Option]], price: float) -> Picks:
    """What each weight takes where a byte costs `price`; of equals the smaller."""
    return tuple(
        min(range(len(us)), key=lambda i: (us[i].cost + price * us[i].size, us[i].size, i))
        for us in units
    )


def _price(units: Sequence[Sequence[Option]], limit: int) -> tuple[float, Picks]:
    """A price at which the cheapest options fit, near the least such price, and those options."""
    if size_of(units, _priced(units, 0.0)) <= limit:
        return 0.0, _priced(units, 0.0)
    low, high = 0.0, 2 * max(option.cost for options in units for option in options) + 1e-300
    for _ in range(100):  # a byte that costs more than any error lets nothing but the smallest win
        middle = (low + high) / 2
        fits = size_of(units, _priced(units, middle)) <= limit
        low, high = (low, middle) if fits else (middle, high)
    picks = _priced(units, high)
    return high, picks if size_of(units, picks) <= limit else cheapest(units)


def _search(
    units: Sequence[Sequence[Option]], limit: int, cap: int, price: float, first: float
) -> list[Picks]:
    """The best choice that costs less than `first`, or none."""
    sizes, costs = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.float64)
    leasts = [min(option.size for option in options) for options in units]
    spare = limit - sum(leasts)
    pairs = list(zip(units, leasts, strict=True))
    to_come = sum(min(o.cost + price * (o.size - least) for o in us) for us, least in pairs)
    rounding = 1e-9 * first + 1e-12 * price * spare  # of the bound: differences of large terms
    trail: list[tuple[Tensor, Tensor]] = []  # for each weight: the state before, and the option
    for options, least in pairs:
        # Sizes are counted beyond the smallest option, so that `spare` is the limit at each step.
        more = torch.tensor([option.size - least for option in options])
        cost = torch.tensor([option.cost for option in options], dtype=torch.float64)
        all_sizes, all_costs = _sums(sizes, more), _sums(costs, cost)
        kept = _undominated(all_sizes, all_costs, spare)
        to_come -= float((cost + price * more).min())
        least_cost = all_costs[kept] + price * (all_sizes[kept] - spare) + to_come
        kept = _thinned(kept[least_cost <= first + rounding], all_sizes, spare, cap)
        if not len(kept):
            return []
        sizes, costs = all_sizes[kept], all_costs[kept]
        before = torch.div(kept, len(options), rounding_mode="floor")
        trail.append((before.to(torch.int32), (kept % len(options)).to(torch.int32)))
    state, picks = int(costs.argmin()), []
    for before, option in reversed(trail):
        picks.append(int(option[state]))
        state = int(before[state])
    return [tuple(reversed(picks))]


def _sums(states: Tensor, options: Tensor) -> Tensor:
    """Every state with every option: [states * options], the option fastest."""
    return (states[:, None] + options[None, :]).reshape(-1)


def _undominated(sizes: Tensor, costs: Tensor, limit: int) -> Tensor:
    """Indices of the states within `limit` that cost less than all smaller ones, by size."""
    order = costs.argsort(stable=True)
    order = order[sizes[order].argsort(stable=True)]
    order = order[sizes[order] <= limit]
    ordered = costs[order]
    lowest = ordered.cummin(0).values
    better = torch.ones_like(order, dtype=torch.bool)
    better[1:] = ordered[1:] < lowest[:-1]
    return order[better]


def _thinned(kept: Tensor, sizes: Tensor, limit: int, cap: int) -> Tensor:
    """At most `cap` of the states: of equal slices of the bytes the first and the last, which are
    the smallest and the best of their slice."""
    if len(kept) <= cap:
        return kept
    step = limit // (cap // 2) + 1
    part = torch.div(sizes[kept], step, rounding_mode="floor")
    edge = part[1:] != part[:-1]
    chosen = torch.zeros(len(kept), dtype=torch.bool)
    chosen[0] = chosen[-1] = True
    chosen[1:] |= edge
    chosen[:-1] |= edge
    return kept[chosen]


def _filled(units: Sequence[Sequence[Option]], picks: Picks, limit: int) -> Picks:
    """`picks` with what still fits: the change of one weight that lowers the cost most, as long as
    there is one."""
    now, spare = list(picks), limit - size_of(units, picks)
    while True:
        gains = [
            (options[now[u]].cost - option.cost, -u, -i)
            for u, options in enumerate(units)
            for i, option in enumerate(options)
            if option.size - options[now[u]].size <= spare and option.cost < options[now[u]].cost
        ]
        if not gains:
            return tuple(now)
        _, u, i = max(gains)
        spare -= units[-u][-i].size - units[-u][now[-u]].size
        now[-u] = -i

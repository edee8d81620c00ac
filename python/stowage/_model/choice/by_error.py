# SPDX-License-Identifier: Apache-2.0
"""Chooses by measured errors: which of a weight's storages keeps `max_error`, and which storages of
all weights together fit a budget of bytes with the least error. docs/choosing.md states the rules.

The search knows numbers only. A price for each byte that makes the cheapest options just fit gives
a first answer and a bound that no answer beats. Then it keeps, weight by weight, every state
(bytes, cost) that no other state beats in both and that can still beat the first answer: exact as
long as there are fewer than the cap, which twelve weights with three options never reach. Beyond
it, states are thinned to the best and the smallest of equal slices of the bytes. Nothing depends on
chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from stowage._model.choice.calibration import Calibration, output_errors
from stowage._model.choice.trials import AS_IT_IS, Trial, Tried, attempt, bytes_at_rest, source
from stowage._model.reports.table import bytes_text
from stowage._model.rest.formation import Making
from stowage._model.sizes import byte_count
from stowage._model.weights import Choice, Held
from stowage._ops.errors import InvalidArgument, raise_problems
from stowage._tensor.stowed import StowedTensor

_EXACT_UNITS = 12
_EXACT_STATES = 1 << 20
_STATES = 1 << 14
ComputeOf = Callable[[Held], torch.dtype]
_LARGEST_COST = 1e30  # of a candidate whose output is not finite


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


Units = Sequence[Sequence[Option]]


@dataclass(frozen=True)
class Limits:
    """What `stow` was asked to keep: an error, or bytes, and how errors are measured."""

    max_error: float | None = None
    on_exceed: str = "plain"
    calibrate: Calibration | None = None
    budget: int | None = None

    @classmethod
    def parse(
        cls,
        max_error: float | None,
        on_exceed: str,
        calibrate: Calibration | None,
        budget: int | str | None,
    ) -> Limits:
        """Raises InvalidArgument for values that are none and for what means nothing alone."""
        number = isinstance(max_error, int | float) and not isinstance(max_error, bool)
        if max_error is not None and not (number and 0 <= max_error < math.inf):
            raise InvalidArgument(
                f"stowage: max_error must be a relative error such as 0.05, got {max_error!r}"
            )
        if on_exceed not in ("plain", "raise"):
            raise InvalidArgument(
                f"stowage: on_exceed must be 'plain' or 'raise', got {on_exceed!r}"
            )
        if calibrate is not None and max_error is None and budget is None:
            raise InvalidArgument("stowage: calibrate must come with max_error or budget")
        size = None if budget is None else byte_count(budget, "budget")
        return cls(max_error, on_exceed, calibrate, size)

    def choose(
        self,
        model: nn.Module,
        choices: list[Choice],
        how: Making,
        restow: bool,
        compute_of: ComputeOf,
        problems: list[str],
    ) -> list[Choice]:
        """`choices` with one storage each. Raises InvalidArgument that lists `problems` and every
        weight that cannot be measured or exceeds the error (where that is asked) or the budget."""
        if self.max_error is None and self.budget is None:
            if any(choice.others for choice in choices):
                problems.append("a list of storages must come with max_error or budget")
            return choices
        trials = self._trials(model, choices, how, restow, problems)
        if self.budget is None:
            picks = [self._first(trial, problems) for trial in trials]
            aim = f"max_error={self.max_error:g}"
        else:
            picks = self._within(self.budget, trials, choices, compute_of, problems)
            aim = f"budget of {bytes_text(self.budget)}, error"
        raise_problems("stowage.stow", problems)
        settled = {t.held.name: t.settled(p, aim) for t, p in zip(trials, picks, strict=True)}
        return [settled.get(choice.held.name) or _resting(choice) for choice in choices]

    def _trials(
        self,
        model: nn.Module,
        choices: list[Choice],
        how: Making,
        restow: bool,
        problems: list[str],
    ) -> list[Trial]:
        # Without outputs and budget the first that is good enough is taken: no more are tried.
        enough = self.max_error if self.budget is None and self.calibrate is None else None
        trials = []
        for choice in choices:
            values = source(choice.held, restow) if choice.candidates else None
            if values is not None:
                trials.append(attempt(choice, values, how, enough, problems))
        if self.calibrate is None or problems:
            return trials
        weights = [(trial.held, trial.possible) for trial in trials]
        errors = output_errors(model, weights, self.calibrate, restow)
        return [trial.with_outputs(errors) for trial in trials]

    def _first(self, trial: Trial, problems: list[str]) -> Tried:
        """The first candidate within the error, else none."""
        for tried in trial.tried:
            if tried.keeps(self.max_error):
                return tried
        self._exceeded(trial, problems)
        return AS_IT_IS

    def _exceeded(self, trial: Trial, problems: list[str]) -> None:
        if self.on_exceed == "raise":
            told = ", ".join(map(str, trial.tried))
            problems.append(
                f"{trial.held.name}: relative error of the {trial.measure} must be at most "
                f"{self.max_error:g} with nothing clipped, got {told}"
            )

    def _within(
        self,
        budget: int,
        trials: list[Trial],
        choices: list[Choice],
        compute_of: ComputeOf,
        problems: list[str],
    ) -> list[Tried]:
        """The candidates that fit `budget` bytes with the least sum of squared errors."""
        if problems:
            return [AS_IT_IS for _ in trials]
        allowed = []
        for trial in trials:
            within = [tried for tried in trial.tried if tried.keeps(self.max_error)]
            if not within:
                self._exceeded(trial, problems)
            allowed.append(within or [AS_IT_IS])
        open_ = {trial.held.name for trial in trials}
        fixed = [choice.held for choice in choices if choice.held.name not in open_]
        fixed_bytes = bytes_at_rest(fixed, [compute_of(held) for held in fixed])
        units = [
            [Option(trial.size(tried, compute_of(trial.held)), _cost(tried)) for tried in some]
            for trial, some in zip(trials, allowed, strict=True)
        ]
        picks = best(units, budget - fixed_bytes, _uniform(allowed, units))
        if picks is not None:
            return [some[pick] for some, pick in zip(allowed, picks, strict=True)]
        smallest = cheapest(units)
        sizes = [(bytes_at_rest([held], [compute_of(held)]), f"{held.name} (as it is)")
                 for held in fixed]  # fmt: skip
        for trial, some, options, pick in zip(trials, allowed, units, smallest, strict=True):
            sizes.append((options[pick].size, f"{trial.held.name} ({some[pick].name})"))
        least = fixed_bytes + size_of(units, smallest)
        problems.append(_too_small(budget, least, sizes))
        return [AS_IT_IS for _ in trials]


def _resting(choice: Choice) -> Choice:
    """A weight that rests already keeps its storage; one of the list is as good as the first."""
    tensor = choice.held.tensor
    if not isinstance(tensor, StowedTensor):
        return choice
    storage = tensor._storage if tensor._storage in choice.candidates else choice.storage
    return replace(choice, storage=storage, others=())


def _cost(tried: Tried) -> float:
    return min(tried.error**2, _LARGEST_COST) if tried.error < math.inf else _LARGEST_COST


def _uniform(allowed: list[list[Tried]], units: Units) -> list[Picks]:
    """For each storage the choice that gives it to every weight that can have it."""
    every = dict.fromkeys(tried.storage for some in allowed for tried in some)
    places = [[tried.storage for tried in some] for some in allowed]
    pairs = list(zip(places, cheapest(units), strict=True))
    return [
        tuple(at.index(storage) if storage in at else least for at, least in pairs)
        for storage in every
    ]


def _too_small(budget: int, least: int, sizes: list[tuple[int, str]]) -> str:
    largest = sorted(sizes, key=lambda one: (-one[0], one[1]))[:3]
    told = ", ".join(f"{name} {size} bytes" for size, name in largest)
    return (
        f"budget must be at least {least} bytes ({bytes_text(least)}), what all parameters take "
        f"with the smallest of these storages, got {budget}; the largest weights are {told}"
    )

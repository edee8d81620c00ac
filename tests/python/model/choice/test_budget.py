# SPDX-License-Identifier: Apache-2.0
"""The choice under a number of bytes, beside trying every combination."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stowage
from stowage._model.choice.by_error import Option, best, cost_of, size_of
from stowage._model.sizes import byte_count

Units = list[list[Option]]

SIZES = st.integers(0, 4000)
COSTS = st.one_of(st.floats(0, 10), st.floats(0, 1e-9), st.just(1e30))
OPTIONS = st.lists(st.builds(Option, SIZES, COSTS), min_size=3, max_size=3)
UNITS = st.lists(OPTIONS, min_size=6, max_size=6)


def exhaustive(units: Units, limit: int) -> float | None:
    """The least cost of all combinations that fit."""
    every = itertools.product(*(range(len(options)) for options in units))
    fitting = [cost_of(units, picks) for picks in every if size_of(units, picks) <= limit]
    return min(fitting, default=None)


@settings(max_examples=150, deadline=None)
@given(UNITS, st.floats(0, 1))
def test_six_weights_are_as_good_as_every_combination(units: Units, share: float) -> None:
    least = sum(min(o.size for o in options) for options in units)
    most = sum(max(o.size for o in options) for options in units)
    limit = least + round((most - least) * share)
    picks, wanted = best(units, limit), exhaustive(units, limit)
    assert picks is not None and wanted is not None
    assert size_of(units, picks) <= limit
    assert cost_of(units, picks) == pytest.approx(wanted, rel=1e-12, abs=1e-12)
    assert best(units, least - 1) is None


@settings(max_examples=40, deadline=None)
@given(UNITS, st.floats(0, 1))
def test_thinned_states_stay_within_five_percent_of_the_range(units: Units, share: float) -> None:
    """What many weights get, forced on few: 64 states instead of all."""
    least = sum(min(o.size for o in options) for options in units)
    limit = least + round(sum(max(o.size for o in options) for options in units) * share)
    picks, wanted = best(units, limit, states=64), exhaustive(units, limit)
    assert picks is not None and wanted is not None and size_of(units, picks) <= limit
    worst = sum(max(o.cost for o in options) for options in units)
    assert wanted <= cost_of(units, picks) <= wanted + 0.05 * worst


def layers(count: int) -> Units:
    """Weights of a few shapes, each with three storages whose error falls with their bytes."""
    shapes = [768 * 768, 768 * 3072, 768 * 2304]
    units = []
    for i in range(count):
        n, noise = shapes[i % 3] + 64 * (i * i % 97), 1 + (i * 37 % 11)
        units.append(
            [
                Option(n * 9 // 16, 8e-3 * noise),
                Option(n + 4 * 768, 7e-4 * noise),
                Option(2 * n, 3e-6),
            ]
        )
    return units


def test_many_weights_are_near_the_bound_and_no_worse_than_uniform() -> None:
    units = layers(180)
    least, most = (sum(f(o.size for o in us) for us in units) for f in (min, max))
    for share in (0.05, 0.3, 0.55, 0.8):
        limit = least + round((most - least) * share)
        uniform = [(i,) * len(units) for i in range(3)]
        picks = best(units, limit, uniform)
        assert picks is not None and size_of(units, picks) <= limit
        for other in uniform:
            if size_of(units, other) <= limit:
                assert cost_of(units, picks) <= cost_of(units, other)
        assert cost_of(units, picks) <= 1.05 * lower_bound(units, limit)
        assert best(units, limit, uniform) == picks


def lower_bound(units: Units, limit: int) -> float:
    """No choice costs less: the greatest Lagrangian bound, which is concave in the price."""

    def bound(price: float) -> float:
        return sum(min(o.cost + price * o.size for o in us) for us in units) - price * limit

    low, high = 0.0, 1e-6
    for _ in range(100):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        low, high = (left, high) if bound(left) < bound(right) else (low, right)
    return bound(low)


def test_a_uniform_choice_is_never_better() -> None:
    """Even where the search keeps two states and misses it."""
    rows = [[(0, 9), (1, 7), (7, 6)], [(5, 6), (0, 3), (2, 0)]]
    rows += [[(2, 9), (1, 3), (3, 3)], [(0, 7), (5, 3), (9, 2)]]
    units = [[Option(size, float(cost)) for size, cost in row] for row in rows]
    uniform = [(i,) * 4 for i in range(3)]
    alone, beside = best(units, 8, states=2), best(units, 8, uniform, states=2)
    assert alone is not None and beside is not None
    assert cost_of(units, alone) > cost_of(units, uniform[1]) >= cost_of(units, beside)


def test_ties_take_fewer_bytes_and_no_weights_are_a_choice_too() -> None:
    assert best([[Option(9, 1.0), Option(8, 1.0), Option(8, 1.0)]], 100) == (1,)
    assert best([], 0) == ()


@pytest.mark.parametrize(
    ("given", "count"),
    [(5, 5), ("0B", 0), ("3GiB", 3 << 30), ("1.5 kib", 1536), ("800 MB", 800_000_000)],
)
def test_sizes_are_bytes_or_text(given: Any, count: int) -> None:
    assert byte_count(given, "budget") == count


@pytest.mark.parametrize("given", [-1, True, 1.5, "3", "GiB", "3 gigs", None, "-1GiB"])
def test_what_is_no_size_is_refused(given: Any) -> None:
    with pytest.raises(stowage.InvalidArgument, match="budget must be a number of bytes"):
        byte_count(given, "budget")

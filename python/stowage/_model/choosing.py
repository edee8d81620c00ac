# SPDX-License-Identifier: Apache-2.0
"""Chooses by measured errors: which of a weight's storages keeps `max_error`, and which storages of
all weights together fit a budget of bytes with the least error. docs/choosing.md states the rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from stowage._model import budget as _budget
from stowage._model.budget import Option
from stowage._model.calibrating import Calibration, output_errors
from stowage._model.sizes import byte_count
from stowage._model.stowing import Making
from stowage._model.table import bytes_text
from stowage._model.trials import AS_IT_IS, Trial, Tried, attempt, bytes_at_rest, source
from stowage._model.weights import Held
from stowage._ops.errors import InvalidArgument, raise_problems
from stowage._tensor.stowed import StowedTensor
from stowage.policy import Choice

Units = Sequence[Sequence[Option]]
ComputeOf = Callable[[Held], torch.dtype]
_LARGEST_COST = 1e30  # of a candidate whose output is not finite


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
        picks = _budget.best(units, budget - fixed_bytes, _uniform(allowed, units))
        if picks is not None:
            return [some[pick] for some, pick in zip(allowed, picks, strict=True)]
        smallest = _budget.cheapest(units)
        sizes = [(bytes_at_rest([held], [compute_of(held)]), f"{held.name} (as it is)")
                 for held in fixed]  # fmt: skip
        for trial, some, options, pick in zip(trials, allowed, units, smallest, strict=True):
            sizes.append((options[pick].size, f"{trial.held.name} ({some[pick].name})"))
        least = fixed_bytes + _budget.size_of(units, smallest)
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


def _uniform(allowed: list[list[Tried]], units: Units) -> list[_budget.Picks]:
    """For each storage the choice that gives it to every weight that can have it."""
    every = dict.fromkeys(tried.storage for some in allowed for tried in some)
    places = [[tried.storage for tried in some] for some in allowed]
    pairs = list(zip(places, _budget.cheapest(units), strict=True))
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

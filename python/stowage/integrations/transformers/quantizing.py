# SPDX-License-Identifier: Apache-2.0
"""Plain weights of a model that come to rest while another loader reads them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable

import torch
from torch import nn

from stowage._model.choice.policy import Policy
from stowage._model.reports.report import remember
from stowage._model.rest.formation import from_values
from stowage._model.stow import stow
from stowage._model.weights import Choice, Inventory
from stowage._ops.errors import raise_problems
from stowage.integrations.transformers.config import StowageConfig
from stowage.integrations.transformers.meaning import policy_of


class Quantizing:
    """Of one load.

    Args:
        model: on the meta device.
        said: which of its weights rest, and how.
        as_it_is: it is the checkpoint that says so: what is plain in it is to stay plain, under
            whatever names this model has for it.

    Raises:
        InvalidArgument: rules and names that match nothing.
    """

    def __init__(self, model: nn.Module, said: StowageConfig, as_it_is: bool) -> None:
        self._as_it_is = as_it_is
        self._grain, self._how = said.policy.grain, said.policy.making
        self._policy: Policy | None = None if as_it_is else policy_of(model, said)
        self._choices: dict[str, Choice] = {}
        if self._policy is None:
            return
        choices = self._policy.choose(model)
        raise_problems("StowageConfig", self._policy.selection.idle_rules(choices))
        if not self._policy.compares:  # else none before all are read
            self._choices = {c.held.name: c for c in choices if c.storage is not None}

    def leave(self, names: Iterable[str]) -> None:
        """These rest in the file."""
        for name in names:
            self._choices.pop(name, None)

    def takes(self, name: str) -> bool:
        return name in self._choices

    def bytes_of(self, name: str, parameter: torch.Tensor) -> int:
        """At rest, of one that is taken."""
        storage = self._choices[name].storage
        assert storage is not None
        layout = storage.for_values(parameter.dtype).layout(tuple(parameter.shape))
        return sum(math.prod(sizes) * dtype.itemsize for _, dtype, sizes in layout)

    def made(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """The parameter that rests, or the values as they came."""
        choice = self._choices.get(name)
        if choice is None or choice.storage is None:
            return values
        with torch.inference_mode(False), torch.no_grad():
            if values.is_inference():
                values = values.clone()
            weight, loss = from_values(values, choice.storage, self._how, values.dtype)
        remember(choice.held, weight, choice.reason, loss)
        return weight

    def finish(self, model: nn.Module) -> None:
        """Lets rest what is plain and is to rest: no file had it, or it was made of several
        tensors, or the errors of all decide; says of the others why they do not."""
        policy = self._policy
        plain = [c for c in policy.choose(model) if not c.held.rests] if policy else []
        if policy and (policy.compares or any(c.storage is not None for c in plain)):
            stow(model, policy)
            return
        for choice in plain:
            remember(choice.held, choice.held.tensor, choice.reason, None)
        inventory = Inventory(model)
        resting = (site.module for h in inventory.every if h.rests for site in h.sites)
        problems = self._grain.problems(inventory, resting)
        if not self._as_it_is:
            raise_problems("StowageConfig", problems)
        for problem in problems:  # the checkpoint's, which another class may open
            warnings.warn(f"StowageConfig: {problem}", stacklevel=2)
        self._grain.apply(inventory)

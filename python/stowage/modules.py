# SPDX-License-Identifier: Apache-2.0
"""`stow` and `unstow`: turns the weights of a model into resting ones, in place, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from stowage._errors import InvalidArgument, StowageError
from stowage._report import Report, loss_of, remember, report
from stowage._storage import Storage
from stowage._stowing import Loss, Making, from_values, relabelled, unfit
from stowage._weights import Held, Swap, buffers, parameters
from stowage.policy import Choice, Policy, Rules, WidePlaces
from stowage.tensor import StowedTensor


def stow(
    model: nn.Module,
    storage: str | Storage | Rules | None,
    *,
    rules: Rules | None = None,
    compute_dtype: torch.dtype | None = None,
    exact: bool = False,
    keep_nonfinite: bool = False,
    restow: bool = False,
    measure: bool = True,
) -> Report:
    """Lets the weights of `model` rest as `storage`, in place; returns what happened to each.

    `storage` is a storage string, or a mapping of rules: a glob over parameter names and module
    paths, or a module type, to a storage or None (stay plain). The first rule that matches decides.
    `rules` go before `storage`, which then decides by the defaults (docs/loading.md) what no rule
    matches. The stowed weights are frozen. With `compute_dtype` every other floating parameter and
    buffer gets that dtype too, as `model.to(dtype)` would; without, each weight keeps its own.
    `exact` makes linear layers bit-equal to dense ones with the dequantized weights.

    Values that are NaN or infinite are refused unless `keep_nonfinite` (casts, nf4, fp4). A weight
    that rests already keeps its storage, unless `restow` asks to quantize its dequantized values.
    `measure=False` saves the pass that fills the errors of the report.

    Raises InvalidArgument that lists every problem; the model is then as it was, as it is after
    any other exception. The peak of memory is the model, its resting weights and a block of rows.
    """
    policy = Policy.parse(storage, rules)
    how = Making(compute_dtype, exact, keep_nonfinite, measure)
    with torch.inference_mode(False), torch.no_grad():
        choices = policy.choose(model)
        work = _Work(how, restow, WidePlaces(model))
        work.problems.extend(policy.idle_rules(choices))
        for choice in choices:
            work.take(choice)
        if compute_dtype is not None:
            for held in buffers(model):
                work.cast(held)
        raise_problems("stowage.stow", work.problems)
        work.swap.commit()
        for held, weight, reason, loss in work.memories:
            remember(held, weight, reason, loss)
    return report(model)


class _Work:
    """Collects the new tensors of one `stow`, and every problem; changes nothing itself."""

    def __init__(self, how: Making, restow: bool, wide: WidePlaces) -> None:
        self.swap = Swap()
        self.problems: list[str] = []
        self.memories: list[tuple[Held, torch.Tensor, str, Loss | None]] = []
        self._how, self._restow, self._wide = how, restow, wide

    def _compute(self, held: Held) -> torch.dtype:
        given = self._how.compute_dtype
        return held.tensor.dtype if given is None or self._wide.contain(held.name) else given

    def take(self, choice: Choice) -> None:
        held, storage = choice.held, choice.storage
        if isinstance(held.tensor, StowedTensor):
            self._take_resting(held, held.tensor, choice)
        elif storage is None:
            self.cast(held)
            self.memories.append((held, held.tensor, choice.reason, None))
        else:
            self._quantize(held, held.tensor, storage, choice.reason)

    def _take_resting(self, held: Held, weight: StowedTensor, choice: Choice) -> None:
        storage, now = choice.storage, weight._storage
        if storage is not None and storage is not now and self._restow:
            self._quantize(held, weight.dequantize(torch.float32), storage, choice.reason)
            return
        compute, exact, reason = self._compute(held), weight._exact, "rested already"
        if storage is now:
            exact = self._how.exact
        elif storage is not None:
            reason = f"rested already; restow=True makes it {storage.name}"
        made: torch.Tensor = weight
        if compute != weight.dtype or exact != weight._exact:
            made = relabelled(weight, compute, exact)
            self.swap.put(held, made)
        self.memories.append((held, made, reason, loss_of(held)))

    def _quantize(self, held: Held, values: torch.Tensor, storage: Storage, reason: str) -> None:
        problem = unfit(held.name, values, storage)
        if not problem:
            try:
                made, loss = from_values(values, storage, self._how, self._compute(held))
            except StowageError as error:
                problem = str(error)
        if problem:
            self.problems.append(f"{held.name}: {problem}")
            self.swap, self.memories = Swap(), []
        elif not self.problems:  # after a problem the rest is only checked
            self.swap.put(held, made)
            self.memories.append((held, made, reason, loss))

    def cast(self, held: Held) -> None:
        """Gives a tensor that stays plain the compute dtype."""
        tensor, compute = held.tensor, self._compute(held)
        if self.problems or not tensor.is_floating_point() or tensor.dtype == compute:
            return
        if isinstance(tensor, nn.Parameter):
            self.swap.put_values(tensor, tensor.detach().to(compute))
        else:
            self.swap.put(held, tensor.to(compute))


def raise_problems(where: str, problems: Sequence[str]) -> None:
    """Raises one InvalidArgument for all `problems`; nothing for none."""
    if len(problems) == 1:
        raise InvalidArgument(f"{where}: {problems[0]}; nothing was changed")
    if problems:
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise InvalidArgument(f"{where}: {len(problems)} problems, nothing was changed:{lines}")


def unstow(model: nn.Module, compute_dtype: torch.dtype | None = None) -> Report:
    """Turns every resting weight of `model` into a plain parameter, in place: its dequantized
    values in `compute_dtype` (default: the weight's own). Ties stay ties. The parameters are
    frozen, as resting ones are; nothing else is changed."""
    swap = Swap()
    with torch.inference_mode(False), torch.no_grad():
        for held in parameters(model):
            if isinstance(held.tensor, StowedTensor):
                values = held.tensor.dequantize(compute_dtype or held.tensor.dtype)
                swap.put(held, nn.Parameter(values, requires_grad=held.tensor.requires_grad))
        swap.commit()
    return report(model)

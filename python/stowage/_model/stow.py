# SPDX-License-Identifier: Apache-2.0
"""`stow` and `unstow`: turns the weights of a model into resting ones, in place, and back.

What `unstow` puts in the place of each resting weight: its master where that is still true, its
dequantized values otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from stowage._model.choice.calibration import Calibration
from stowage._model.choice.policy import Policy
from stowage._model.choice.selection import Rules, Wish
from stowage._model.choice.skips import Skip
from stowage._model.declared import WidePlaces, adapter_paths
from stowage._model.reports.report import loss_of, remember, report
from stowage._model.reports.table import Report
from stowage._model.rest.formation import Loss, Making, from_values, relabelled, unfit
from stowage._model.rest.granularity import Blocks, InputCast, forget, holders
from stowage._model.rest.masters import (
    Keeping,
    Master,
    check_intact,
    forget_master,
    fresh_master,
    master_of,
)
from stowage._model.weights import Choice, Held, Inventory, Swap
from stowage._ops.device_kernels import Looks
from stowage._ops.errors import InvalidArgument, StowageError, raise_problems
from stowage._ops.storage import Storage
from stowage._tensor.casts import is_cast_of_itself
from stowage._tensor.stowed import StowedTensor


def stow(
    model: nn.Module,
    storage: Wish | Policy = None,
    *,
    rules: Rules | None = None,
    skip: Skip = None,
    allow_unmatched: bool = False,
    max_error: float | None = None,
    on_exceed: str = "plain",
    calibrate: Calibration | None = None,
    budget: int | str | None = None,
    compute_dtype: torch.dtype | None = None,
    exact: bool = False,
    keep_nonfinite: bool = False,
    restow: bool = False,
    measure: bool = True,
    keep_master: str | None = None,
    master_folder: str | os.PathLike[str] | None = None,
    buffers: bool = False,
    working: str | None = None,
    blocks: Blocks = None,
    input_cast: InputCast = None,
) -> Report:
    """Lets the weights of `model` rest as `storage`, in place.

    The stowed weights are frozen. A weight that rests already keeps its storage unless `restow`.
    All problems come in one error, before any change. The peak of memory is the model, its resting
    weights and a block of rows. docs/choosing.md and docs/working.md have the rules.

    Args:
        model: any module.
        storage: a storage string, a list of such to choose from by measured errors, None (the
            defaults let nothing rest), or a `stowage.Policy`, which has this and what follows it
            but for `restow` and masters.
        rules: a glob over parameter names and module paths, a regular expression, a module type or
            a predicate, to a storage, a list of storages or None (stay plain). The first match
            decides; `storage` decides by the defaults what no rule matches.
        skip: patterns that stay plain whatever a rule says, or "diffusion", "language" or "auto".
        allow_unmatched: permits rules and skips that match nothing.
        max_error: the largest relative error that a weight may have.
        on_exceed: what a weight above it does: "plain" or "raise".
        calibrate: runs the model on samples, so that errors are those of the modules' outputs.
        budget: bytes for all resting weights together (an int, or a text such as "2GiB").
        compute_dtype: what every floating parameter and buffer works in; without, each keeps its
            own.
        exact: makes linear layers bit-equal to dense ones with the dequantized weights.
        keep_nonfinite: keeps NaN and infinities (casts, nf4, fp4) instead of refusing them.
        restow: quantizes the dequantized values of weights that rest otherwise.
        measure: fills the errors of the report, which takes one more pass over the values.
        keep_master: keeps the exact values for `unstow`, in "ram" or on "disk".
        master_folder: where their files lie; without, a temporary folder.
        buffers: lets rules name buffers too.
        working: how much is widened at once: "tile", "layer" or "block".
        blocks: the modules whose weights are widened together.
        input_cast: the modules whose inputs are cast to the compute dtype.

    Returns:
        What happened to each parameter, with its bytes and errors.

    Raises:
        InvalidArgument: lists every problem; the model is then as it was.

    Example:
        >>> report = stowage.stow(model, "nf4", rules={"2.*": "f8_e4m3:row"})
        >>> report["0.weight"].storage, report["2.weight"].storage
        ('nf4:block64', 'f8_e4m3:row')
    """
    policy = Policy.of(
        storage,
        "stowage.stow",
        rules=rules,
        skip=skip,
        allow_unmatched=allow_unmatched,
        max_error=max_error,
        on_exceed=on_exceed,
        calibrate=calibrate,
        budget=budget,
        compute_dtype=compute_dtype,
        exact=exact,
        keep_nonfinite=keep_nonfinite,
        measure=measure,
        buffers=buffers,
        working=working,
        blocks=blocks,
        input_cast=input_cast,
    )
    if not policy.said():
        raise InvalidArgument("stowage.stow: a storage, rules or a policy must be given, got none")
    keeping = Keeping(keep_master, master_folder)
    with torch.inference_mode(False), torch.no_grad():
        work = _Work(policy.making, restow, WidePlaces(model), keeping)
        _put_to_rest(Inventory(model), policy, work)
    return report(model)


def _put_to_rest(inventory: Inventory, policy: Policy, work: _Work) -> None:
    selection, grain = policy.selection, policy.grain
    choices = selection.choices(inventory, policy.buffers)
    work.problems.extend(selection.idle_rules(choices))
    asked = (work.how, work.restow, work.compute_of)
    choices = policy.limits.choose(inventory.model, choices, *asked, work.problems)
    work.problems.extend(grain.problems(inventory, holders(choices)))
    work.take_all(choices)
    if work.how.compute_dtype is not None and not policy.buffers:
        for held in inventory.buffers:
            work.cast(held)
    raise_problems("stowage.stow", work.problems)
    work.keeping.make()
    work.swap.commit()
    work.keeping.attach()
    for held, weight, reason, loss in work.memories:
        remember(held, weight, reason, loss)
    grain.apply(inventory)


class _Work:
    """Collects the new tensors of one `stow`, and every problem; changes nothing itself."""

    def __init__(self, how: Making, restow: bool, wide: WidePlaces, keeping: Keeping) -> None:
        self.swap = Swap()
        self.problems: list[str] = []
        self.memories: list[tuple[Held, torch.Tensor, str, Loss | None]] = []
        self.how, self.restow, self._wide, self.keeping = how, restow, wide, keeping

    def compute_of(self, held: Held) -> torch.dtype:
        given = self.how.compute_dtype
        return held.tensor.dtype if given is None or self._wide.contain(held.name) else given

    def take_all(self, choices: Sequence[Choice]) -> None:
        with Looks() as looks:
            for choice in choices:
                looks.of = choice
                self.take(choice)
        for choice in looks.refused():
            self.take(choice)  # by itself: what is wrong is named

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
        same = storage is not None and storage.accepts(now)
        if storage is not None and not same and self._take_again(held, weight, choice):
            return
        compute, exact, reason = self.compute_of(held), weight._exact, "rested already"
        if same:
            exact = self.how.exact
        elif storage is not None:
            reason = f"rested already; restow=True makes it {storage.name}"
        made: torch.Tensor = weight
        if compute != weight.dtype or exact != weight._exact:
            made = relabelled(weight, compute, exact)
            self.swap.put(held, made)
        self.memories.append((held, made, reason, loss_of(held)))

    def _take_again(self, held: Held, weight: StowedTensor, choice: Choice) -> bool:
        """Makes another storage of a resting weight, from its master or, if asked, its values."""
        storage, master = choice.storage, fresh_master(held)
        assert storage is not None
        if master is None and not self.restow and not is_cast_of_itself(weight):
            return False
        values = weight.dequantize(torch.float32) if master is None else master.kept.read()
        source = "made from its dequantized values" if master is None else "made from its master"
        reason = f"{choice.reason}; {source}" if choice.reason else source
        self._quantize(held, values.to(weight.device), storage, reason, master)
        return True

    def _quantize(
        self,
        held: Held,
        values: torch.Tensor,
        storage: Storage,
        reason: str,
        master: Master | None = None,
    ) -> None:
        problem = unfit(held.name, values, storage)
        if not problem:
            try:
                made, loss = from_values(values, storage, self.how, self.compute_of(held))
            except StowageError as error:
                problem = str(error)
        if problem:
            self.problems.append(f"{held.name}: {problem}")
            self.swap, self.memories = Swap(), []
        elif not self.problems:  # after a problem the rest is only checked
            self.swap.put(held, made)
            self.keeping.note(held, made, master)
            self.memories.append((held, made, reason, loss))

    def cast(self, held: Held) -> None:
        """Gives a tensor that stays plain the compute dtype."""
        tensor, compute = held.tensor, self.compute_of(held)
        if self.problems or not tensor.is_floating_point() or tensor.dtype == compute:
            return
        if isinstance(tensor, StowedTensor):  # a buffer that was stowed before
            self.swap.put(held, relabelled(tensor, compute, tensor._exact))
            return
        made = tensor.detach().to(compute)
        self.keeping.note(held, made)
        if isinstance(tensor, nn.Parameter):
            self.swap.put_values(tensor, made)
        else:
            self.swap.put(held, made)


def unstow(model: nn.Module, compute_dtype: torch.dtype | None = None) -> Report:
    """Turns every resting weight of `model` into a plain parameter, in place; ties stay ties.

    A weight with a master (`stow(..., keep_master=)`) gets its exact original back: bits, dtype and
    requires_grad, rounded only where `compute_dtype` asks. A weight without one, or written since,
    gets its dequantized values and stays frozen. The masters are gone afterwards.

    Args:
        model: a module, some of whose weights rest.
        compute_dtype: the dtype of the plain parameters; without, that of each weight.

    Returns:
        One row for each parameter, whose reason says which of the two it got.

    Raises:
        BadFile: the file of a master was damaged; nothing is changed then.

    Example:
        >>> before = model[0].weight.clone()
        >>> stowage.stow(model, "int8", keep_master="ram")
        >>> stowage.unstow(model)
        >>> torch.equal(model[0].weight, before)
        True
    """
    with torch.inference_mode(False), torch.no_grad():
        back = restored(model, compute_dtype)
        back.swap.commit()
        back.finish()
        forget(model)
    return report(model)


@dataclass
class Restored:
    """The new tensors of one `unstow`, not yet in force."""

    swap: Swap = field(default_factory=Swap)
    _reasons: list[tuple[Held, torch.Tensor, str]] = field(default_factory=list)
    _every: list[Held] = field(default_factory=list)

    def put(self, held: Held, plain: nn.Parameter, reason: str) -> None:
        self.swap.put(held, plain)
        self._reasons.append((held, plain, reason))

    def done_with(self, held: Held) -> None:
        self._every.append(held)

    def finish(self) -> None:
        """After the commit: remembers the reasons and lets the masters go."""
        for held, plain, reason in self._reasons:
            remember(held, plain, reason)
        forget_master(self._every)


def restored(model: nn.Module, compute: torch.dtype | None) -> Restored:
    """Raises BadFile where the file of a master was damaged."""
    every = Inventory(model).every
    fresh = {id(held): master for held in every if (master := fresh_master(held)) is not None}
    check_intact(list(fresh.values()))
    frozen = bool(adapter_paths(model))  # PEFT has frozen the base: the masters are older
    back = Restored()
    for held in every:
        master = fresh.get(id(held))
        if isinstance(held.tensor, StowedTensor):
            _take_weight(back, held, held.tensor, master, compute, frozen)
        elif compute is None:
            _take_plain(back, held, master)
        back.done_with(held)
    return back


def _take_weight(
    back: Restored,
    held: Held,
    weight: StowedTensor,
    master: Master | None,
    compute: torch.dtype | None,
    frozen: bool,
) -> None:
    trains = weight.requires_grad
    if master is None:
        stale = master_of(held) is not None
        reason = "dequantized: " + ("written since its master was kept" if stale else "no master")
        plain = weight.dequantize(compute or weight.dtype)
    else:
        reason = f"its exact original, from {_PLACES[master.kept.place]}"
        plain = master.kept.take().to(weight.device, compute)
        trains = trains if frozen else master.requires_grad
    back.put(held, nn.Parameter(plain, requires_grad=trains), reason)


_PLACES = {"ram": "memory", "disk": "its file"}


def _take_plain(back: Restored, held: Held, master: Master | None) -> None:
    """A tensor that `stow` gave the compute dtype."""
    if master is None:
        return
    original = master.kept.take().to(held.tensor.device)
    if isinstance(held.tensor, nn.Parameter):
        back.swap.put_values(held.tensor, original)
    else:
        back.swap.put(held, original)

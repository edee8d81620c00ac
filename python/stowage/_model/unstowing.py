# SPDX-License-Identifier: Apache-2.0
"""What `unstow` puts in the place of each resting weight: its master where that is still true, its
dequantized values otherwise."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from stowage._model.declared import adapter_paths
from stowage._model.masters import Master, check_intact, forget, fresh_master, master_of
from stowage._model.report import remember
from stowage._model.weights import Held, Swap, values
from stowage._tensor.stowed import StowedTensor


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
        forget(self._every)


def restored(model: nn.Module, compute: torch.dtype | None) -> Restored:
    """Raises BadFile where the file of a master was damaged."""
    every = list(values(model))
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

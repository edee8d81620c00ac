# SPDX-License-Identifier: Apache-2.0
"""Masters: the exact values that weights were stowed from, kept beside the resting ones.

They belong to the modules that hold the weights. A deep copy of the model shares them, a pickle and
a state_dict hold none, `.to()` leaves them where they are. A weight that has been written since is
known by the stamp of its bytes; its master is then stale and never used.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from stowage._model.rest.beside import Beside, Kept, check_place, keep, verify
from stowage._model.sizes import memory
from stowage._model.stamps import stamp
from stowage._model.weights import Held, Inventory
from stowage._tensor.stowed import StowedTensor

_MASTERS = "_stowage_masters"  # attribute of a module: name of its parameter -> Master


@dataclass(frozen=True)
class Master:
    """The original of one parameter or buffer."""

    kept: Kept
    requires_grad: bool
    stamp: tuple[int, ...]  # of what was made from it


def _bytes_of(tensor: torch.Tensor) -> tuple[int, ...]:
    return stamp(memory(tensor))


def master_of(held: Held) -> Master | None:
    """The master of a weight, stale or not."""
    for site in held.sites:
        found: Master | None = site.module.__dict__.get(_MASTERS, {}).get(site.attribute)
        if found is not None:
            return found
    return None


def is_fresh(master: Master, held: Held) -> bool:
    """Whether the weight is still, byte for byte, what was made from the master."""
    return master.stamp == _bytes_of(held.tensor)


def fresh_master(held: Held) -> Master | None:
    master = master_of(held)
    return master if master is not None and is_fresh(master, held) else None


def state_of(held: Held) -> tuple[str | None, int]:
    """For the report: ram, disk, stale or None, and the bytes it takes."""
    master = master_of(held)
    if master is None:
        return None, 0
    return (master.kept.place if is_fresh(master, held) else "stale"), master.kept.nbytes


@dataclass
class Keeping:
    """What one `stow` keeps: notes each replaced tensor, makes the masters, then attaches them."""

    place: str | None = None
    folder: str | os.PathLike[str] | None = None
    _replaced: list[tuple[Held, torch.Tensor, torch.Tensor, Master | None]] = field(
        default_factory=list
    )
    _made: list[tuple[Held, Master | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_place("stowage.stow", "keep_master", self.place, self.folder)

    def note(self, held: Held, new: torch.Tensor, master: Master | None = None) -> None:
        """`new`, made from the tensor of `held` or from its `master`, takes its place."""
        self._replaced.append((held, held.tensor.detach(), new, master))

    def make(self) -> None:
        """Makes the masters; the model is not changed yet. Raises FileError."""
        fresh = {
            held.name: old
            for held, old, _, master in self._replaced
            if self.place and master is None and not isinstance(old, StowedTensor)
        }
        kept = keep(fresh, self.place, self.folder) if self.place else {}
        for held, _, new, master in self._replaced:
            original = master.kept if master is not None else kept.get(held.name)
            if original is None:
                self._made.append((held, None))
                continue
            asked = held.tensor.requires_grad if master is None else master.requires_grad
            self._made.append((held, Master(original, asked, _bytes_of(new))))

    def attach(self) -> None:
        """Cannot fail. A weight made from anything but its master loses the one it had."""
        for held, master in self._made:
            for site in held.sites:
                if master is not None:
                    site.module.__dict__.setdefault(_MASTERS, Beside())[site.attribute] = master
                else:
                    site.module.__dict__.get(_MASTERS, {}).pop(site.attribute, None)


def check_intact(masters: Sequence[Master]) -> None:
    """Raises BadFile where the file of a master was damaged."""
    verify([master.kept for master in masters])


def forget_master(every: Sequence[Held]) -> None:
    """Takes the masters of these tensors away; their memory and files go with them."""
    for held in every:
        for site in held.sites:
            site.module.__dict__.get(_MASTERS, {}).pop(site.attribute, None)


def drop_master(model: nn.Module) -> int:
    """Frees the exact values that `stow(..., keep_master=...)` kept for `model`, files included.

    The weights rest on; `unstow` then dequantizes them. Masters that a deep copy of the model
    shares stay with the copy.

    Args:
        model: a module whose weights have masters.

    Returns:
        The bytes that were freed, in memory and on the disk.

    Example:
        >>> stowage.stow(model, "int8", keep_master="ram")
        >>> stowage.drop_master(model)  # two weights of 64 x 64 in fp32
        32768
    """
    every = Inventory(model).every
    freed = {id(m.kept): m.kept.nbytes for held in every if (m := master_of(held)) is not None}
    for module in model.modules():
        module.__dict__.pop(_MASTERS, None)
    return sum(freed.values())

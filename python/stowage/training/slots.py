# SPDX-License-Identifier: Apache-2.0
"""A resting parameter and its fp32 master: how the one is made from the other, and who has written
last."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from stowage._ops import _torch
from stowage._ops.errors import InvalidArgument
from stowage._ops.numbers.stochastic import key_of
from stowage._shard.groups import groups_of
from stowage._shard.rows import StowedRows
from stowage.training.init.kept import origin_of
from stowage.training.init.origin import KEPT, UNSET, Home, Origin, Terms
from stowage.training.master_casts import Job

MASTER, CASTS = "master", "casts"  # what an optimizer's state of a resting parameter has besides


@dataclass(eq=False)
class Slot:
    """A resting parameter and its master."""

    name: str
    parameter: Any
    master: Any  # a leaf, spread as the parameter is
    source: str  # kept or resting: what the master was made from
    writes: int = 0  # of the weight, when master and weight were last the same
    casts: int = 0  # how often the weight has been made from the master
    loaded: bool = False  # the master came from a checkpoint: it counts, whatever rests
    version: int = 0  # of the master's memory, when this optimizer last wrote it
    shown: Any = field(init=False)  # the master for others: writes to it count in `version`

    def __post_init__(self) -> None:
        self.shown = _like(_torch.local_of(self.master).detach(), self.master)
        self.settle()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.shown = _like(_torch.local_of(self.master).detach(), self.master)
        self.version = _torch.version(_torch.local_of(self.shown))
        if origin_of(self.parameter) is None:  # a pickle leaves the count of writes out
            self.writes = _counted(self.parameter, self.name).writes

    @property
    def origin(self) -> Origin:
        found = origin_of(self.parameter)
        return _counted(self.parameter, self.name) if found is None else found

    @property
    def extras(self) -> dict[str, Any]:
        """What belongs to the optimizer's state beside the moments."""
        return {MASTER: self.shown, CASTS: self.casts}

    @torch.no_grad()
    def follow(self) -> None:
        """Makes the master again where somebody else has written the weight."""
        origin = self.origin
        if origin.writes != self.writes and not self.loaded:
            self.source = "kept" if origin.state == KEPT else "resting"
            _torch.local_of(self.master).copy_(_values(self.parameter, origin))
            self.settle()

    def prepare(self) -> None:
        """Before a step: also ends what was kept."""
        self.follow()
        self.origin.clear("at the first step of MasterOptimizer, which has its master")

    def take_gradient(self) -> None:
        grad = self.parameter.grad
        self.master.grad = None if grad is None else grad.to(torch.float32)

    def load(self, master: Tensor, casts: int) -> None:
        """Takes the values of a checkpoint. Its own memory, given back as it was, is no news
        (accelerate does that); torch.distributed.checkpoint has loaded into it by then."""
        given, mine = _torch.local_of(master), _torch.local_of(self.shown)
        if given.data_ptr() != mine.data_ptr() or _torch.version(mine) != self.version:
            if self.origin.state == KEPT:  # it may be the master's memory
                self.origin.clear("when MasterOptimizer loaded its masters")
            self.shown.copy_(master)
            self.version, self.loaded = _torch.version(mine), True
        self.casts = casts

    def settle(self) -> None:
        """Master and weight are the same, but for rounding."""
        self.writes, self.version = self.origin.writes, _torch.version(_torch.local_of(self.shown))

    def job(self, seed: int | None, via: torch.dtype | None) -> Job:
        """The next cast."""
        groups = groups_of(self.parameter) if isinstance(self.parameter, DTensor) else ()
        key = None if seed is None else key_of(seed, f"{self.name} {self.casts + 1}")
        master = _torch.local_of(self.master).detach()
        return Job(self.name, _torch.local_of(self.parameter), master, None, groups, via, key)


def slot_of(name: str, parameter: Any) -> Slot:
    """With a master that starts from the exact init value where one is kept."""
    found = origin_of(parameter)
    origin = _counted(parameter, name) if found is None else found
    source = "kept" if origin.state == KEPT else "resting"
    master = _like(_values(parameter, origin).detach(), parameter).requires_grad_()
    return Slot(name, parameter, master, source)


def _like(local: Tensor, tensor: Any) -> Any:
    """What this process has, spread as `tensor` is; the same memory."""
    if not isinstance(tensor, DTensor):
        return local
    shape, stride = tensor.shape, tensor.stride()
    placed = (tensor.device_mesh, tensor.placements)
    return DTensor.from_local(local, *placed, run_check=False, shape=shape, stride=stride)


def _counted(parameter: Any, name: str) -> Origin:
    """An origin that keeps nothing, so that writes are counted."""
    local, made = _torch.local_of(parameter), Origin(Terms(False), Home(), name)
    if isinstance(local, StowedRows):
        local._place.origin = made
    else:
        local._origin = made
    return made


def _values(parameter: Any, origin: Origin) -> Tensor:
    """fp32, on the weight's device; the kept value itself where that is such a tensor."""
    local = _torch.local_of(parameter)
    if origin.state == KEPT:
        return origin.lent().to(device=local.device, dtype=torch.float32)
    if origin.state == UNSET and origin.writes == 0:
        raise InvalidArgument(
            f"MasterOptimizer: {origin.name} must have been initialised, or loaded, got a weight "
            "that was made on meta and never written"
        )
    return local.dequantize(torch.float32)

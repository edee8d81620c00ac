# SPDX-License-Identifier: Apache-2.0
"""Any optimizer of torch over fp32 masters, whose weights rest: the step is taken in fp32, and what
rests is made from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stowage._errors import InvalidArgument
from stowage._numbers.stochastic import key_of
from stowage._shard.groups import groups_of
from stowage._shard.rows import StowedRows
from stowage.training.casting import Job, cast, local_of, rests
from stowage.training.kept import origin_of
from stowage.training.origin import KEPT, UNSET, Origin
from stowage.training.terms import Home, Terms

ROUNDING = ("nearest", "stochastic")


@dataclass
class _Slot:
    """A resting parameter and its master."""

    name: str
    parameter: Any
    master: Any  # a leaf, spread as the parameter is
    source: str  # kept or resting: what the master was made from
    writes: int  # of the weight, when master and weight were last the same

    @property
    def origin(self) -> Origin:
        found = origin_of(self.parameter)
        return _counted(self.parameter, self.name) if found is None else found


class MasterOptimizer(torch.optim.Optimizer):
    """`optimizer_class` over fp32 masters of the resting parameters of `params`, and over the other
    parameters as they are.

    `params`: a model, or what torch's optimizers take; `options` go to `optimizer_class`. A master
    starts from the exact init value where one is kept: that very tensor, if it is fp32 in memory on
    the weight's device, else a copy; without one from the values that rest. `sources` says which,
    by name. The kept values are released at the first step. Where a weight is written by anybody
    else (`load_state_dict`), its master is made from it again before the next step; after
    `load_state_dict` of the optimizer itself the masters count.

    A step gives the masters the gradients, in fp32, steps, and casts with one reduction for all
    (`from_masters`), to nearest or, with rounding="stochastic", by `seed`, name and number of the
    step. Masters, moments and results are sharded as the parameters are. Schedulers work
    on `param_groups`, which hold the masters. Raises InvalidArgument."""

    def __init__(
        self,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        params: Any,
        *,
        rounding: Literal["nearest", "stochastic"] = "nearest",
        seed: int = 0,
        via: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        if rounding not in ROUNDING:
            raise InvalidArgument(
                f"MasterOptimizer: rounding must be one of {ROUNDING}, got {rounding!r}"
            )
        self._seed, self._via = (seed if rounding == "stochastic" else None), via
        self._slots: list[_Slot] = []
        self._steps, self._masters_count = 0, False
        self._given: list[Any] = []
        groups = [self._group(group) for group in _groups(params)]
        self._inner = optimizer_class(groups, **options)
        self._ready = False
        super().__init__([{"params": [torch.empty(0)]}], self._inner.defaults)
        self._ready = True
        self._follow()

    def _follow(self) -> None:
        self.param_groups, self.state = self._inner.param_groups, self._inner.state

    def _group(self, group: dict[str, Any]) -> dict[str, Any]:
        """The same group with masters in place of resting parameters."""
        made = []
        for name, parameter in _named(group, len(self._given)):
            self._given.append(parameter)
            if not rests(parameter):
                made.append(parameter)
            elif parameter.requires_grad:
                slot = _slot(name, parameter)
                self._slots.append(slot)
                made.append(slot.master)
        return {**{k: v for k, v in group.items() if k != "param_names"}, "params": made}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if not self._ready:  # torch's own constructor calls it
            super().add_param_group(param_group)
            return
        given = param_group["params"]
        listed = [given] if isinstance(given, Tensor) else list(given)
        self._inner.add_param_group(self._group({**param_group, "params": listed}))

    @property
    def masters(self) -> dict[str, Tensor]:
        """By name of the parameter: fp32, the memory that steps are taken in."""
        return {slot.name: slot.master.detach() for slot in self._slots}

    @property
    def sources(self) -> dict[str, str]:
        """By name: "kept" for masters that are the exact init values, else "resting"."""
        return {slot.name: slot.source for slot in self._slots}

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self._given:
            if parameter.grad is not None:
                if set_to_none:
                    parameter.grad = None
                else:
                    parameter.grad.detach_().zero_()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            stepped = [slot for slot in self._slots if slot.parameter.grad is not None]
            for slot in self._slots:
                self._refresh(slot)
                slot.origin.clear("at the first step of MasterOptimizer, which has its master")
            for slot in stepped:
                slot.master.grad = slot.parameter.grad.to(torch.float32)
            self._inner.step()
            self._steps += 1
            cast([self._job(slot) for slot in stepped])
            for slot in self._slots:
                slot.master.grad, slot.writes = None, slot.origin.writes
        self._masters_count = False
        return loss

    def _refresh(self, slot: _Slot) -> None:
        """Follows a write of somebody else."""
        if slot.origin.writes != slot.writes and not self._masters_count:
            local_of(slot.master).copy_(_values(slot.parameter, slot.origin))

    def _job(self, slot: _Slot) -> Job:
        groups = groups_of(slot.parameter) if isinstance(slot.parameter, DTensor) else ()
        key = None if self._seed is None else key_of(self._seed, f"{slot.name} {self._steps}")
        master = local_of(slot.master).detach()
        return Job(slot.name, local_of(slot.parameter), master, None, groups, self._via, key)

    @torch.no_grad()
    def fill_state(self) -> None:
        """Makes the moments of an optimizer that has not stepped yet, for a checkpoint to be loaded
        into: one step of the inner optimizer with zero gradients and a learning rate of 0."""
        if self.state:
            raise InvalidArgument("MasterOptimizer: fill_state must come before the first step")
        every = [p for group in self.param_groups for p in group["params"]]
        rates, grads = [g["lr"] for g in self.param_groups], [p.grad for p in every]
        for p in every:
            p.grad = torch.zeros_like(p)
        for group in self.param_groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        self._inner.step()
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate
        for p, grad in zip(every, grads, strict=True):
            p.grad = grad

    def state_dict(self) -> dict[str, Any]:
        """That of the inner optimizer, `masters` by name, and the number of steps."""
        return {**self._inner.state_dict(), "masters": self.masters, "steps": self._steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave. The weights are the model's to load, before or after:
        until the next step the masters count, whatever was written to the weights."""
        state = dict(state_dict)
        masters, steps = state.pop("masters", None), state.pop("steps", 0)
        wanted = {slot.name for slot in self._slots}
        if masters is None or masters.keys() != wanted:
            raise InvalidArgument(
                f"MasterOptimizer: the state must have masters of {sorted(wanted)}, got "
                f"{'none' if masters is None else sorted(masters)}"
            )
        with torch.no_grad():
            for slot in self._slots:
                if slot.origin.state == KEPT:  # it may be the master's memory
                    slot.origin.clear("when MasterOptimizer loaded its masters")
                slot.master.copy_(masters[slot.name])
        self._inner.load_state_dict(state)
        self._steps, self._masters_count = int(steps), True
        self._follow()


def _groups(params: Any) -> list[dict[str, Any]]:
    if isinstance(params, nn.Module):
        return [{"params": list(params.named_parameters())}]
    listed = list(params)
    if listed and isinstance(listed[0], dict):
        return [
            {**g, "params": [g["params"]] if isinstance(g["params"], Tensor) else list(g["params"])}
            for g in listed
        ]
    return [{"params": listed}]


def _named(group: dict[str, Any], count: int) -> Iterable[tuple[str, Any]]:
    for i, given in enumerate(group["params"]):
        yield given if isinstance(given, tuple) else (str(count + i), given)


def _counted(parameter: Any, name: str) -> Origin:
    """An origin that keeps nothing, so that writes are counted."""
    local, made = local_of(parameter), Origin(Terms(False), Home(), name)
    if isinstance(local, StowedRows):
        local._kept[0] = made
    else:
        local._origin = made
    return made


def _values(parameter: Any, origin: Origin) -> Tensor:
    """fp32, on the weight's device; the kept value itself where that is such a tensor."""
    local = local_of(parameter)
    if origin.state == KEPT:
        return origin.lent().to(device=local.device, dtype=torch.float32)
    if origin.state == UNSET and origin.writes == 0:
        raise InvalidArgument(
            f"MasterOptimizer: {origin.name} must have been initialised, or loaded, got a weight "
            "that was made on meta and never written"
        )
    return local.dequantize(torch.float32)


def _slot(name: str, parameter: Any) -> _Slot:
    found = origin_of(parameter)
    origin = _counted(parameter, name) if found is None else found
    source = "kept" if origin.state == KEPT else "resting"
    value = _values(parameter, origin).detach()
    if isinstance(parameter, DTensor):
        value = DTensor.from_local(
            value,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    return _Slot(name, parameter, value.requires_grad_(), source, origin.writes)

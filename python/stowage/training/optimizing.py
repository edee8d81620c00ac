# SPDX-License-Identifier: Apache-2.0
"""Any optimizer of torch over fp32 masters, whose weights rest: the step is taken in fp32, and what
rests is made from it.

Two optimizers: this one holds the parameters that the user gave, with their gradients, so that all
that torch does with an optimizer's parameters (scalers, clipping, checkpoints by name) finds them;
the inner one holds the masters in their place. Options and state are the same in both: what
`param_groups` and `state` say here goes to the inner one before a step and comes back after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stowage._ops.errors import InvalidArgument
from stowage._shard.rows import rests
from stowage.training.master_casts import cast
from stowage.training.slots import CASTS, MASTER, Slot, slot_of

ROUNDING = ("nearest", "stochastic")
_OF_PARAMETERS = ("params", "param_names")  # what the groups of the two optimizers do not share


class MasterOptimizer(torch.optim.Optimizer):
    """Any optimizer of torch over fp32 masters of the resting parameters that want a gradient.

    A master starts from the exact init value where one is kept: that very tensor, if it is fp32 in
    memory on the weight's device, else a copy; without one from the values that rest. The kept
    values are released at the first step. Where a weight is written by anybody else
    (`load_state_dict`), its master is made from it again before the next step; after
    `load_state_dict` of the optimizer itself the masters count.

    A step gives the masters the gradients, in fp32, steps, and casts with one reduction for all
    (`from_masters`). A closure sees weights of the masters of the moment. Masters, moments and
    results are sharded as the parameters are. `param_groups` holds the parameters, so that gradient
    scalers, schedulers, clipping and `torch.distributed.checkpoint` work as with any optimizer;
    `state[parameter]` has the moments and, as "master", the master.

    Args:
        optimizer_class: such as torch.optim.AdamW.
        params: a model, or what torch's optimizers take; parameters that do not rest are as they
            are.
        rounding: "nearest" or "stochastic", by `seed`, name and number of the cast.
        seed: of stochastic rounding.
        via: as in `from_masters`.
        options: go to `optimizer_class`.

    Raises:
        InvalidArgument: an unknown rounding, or parameters that cannot have a master.

    Example:
        >>> with stowage.training.quantized_init("int8:row"):
        ...     layer = nn.Linear(64, 64)
        >>> optimizer = stowage.training.MasterOptimizer(torch.optim.SGD, layer, lr=0.1)
        >>> layer(x).sum().backward()
        >>> optimizer.step()
        >>> layer.weight.resting, optimizer.masters["weight"].dtype
        ('int8:row', torch.float32)
    """

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
        self._slots: dict[Any, Slot] = {}  # by parameter
        self._count = 0  # of parameters that were given
        self._inner: Any = None
        names: dict[Any, str] = {}
        if isinstance(params, nn.Module):
            names = {parameter: name for name, parameter in params.named_parameters()}
            params = list(names)
        groups = [self._trained(group, names) for group in _groups(params)]
        inner = optimizer_class([self._over_masters(group) for group in groups], **options)
        super().__init__(groups, inner.defaults)
        self._inner = inner

    def __getstate__(self) -> dict[str, Any]:
        self._follow()
        own = ("_seed", "_via", "_slots", "_count", "_inner")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    # --- two optimizers -----------------------------------------------------------------------

    def _trained(self, group: dict[str, Any], names: dict[Any, str]) -> dict[str, Any]:
        """The group without weights that rest and are frozen; the others that rest get a slot."""
        kept = []
        for given in group["params"]:
            usual = names.get(given, str(self._count))
            name, parameter = given if isinstance(given, tuple) else (usual, given)
            self._count += 1
            if rests(parameter):
                if not parameter.requires_grad:
                    continue
                if parameter not in self._slots:
                    self._slots[parameter] = slot_of(name, parameter)
            kept.append(given)
        return {**group, "params": kept}

    def _over_masters(self, group: dict[str, Any]) -> dict[str, Any]:
        """The same group with masters in place of resting parameters."""
        given = (g[1] if isinstance(g, tuple) else g for g in group["params"])
        masters = [self._slots[p].master if p in self._slots else p for p in given]
        return {**{k: v for k, v in group.items() if k not in _OF_PARAMETERS}, "params": masters}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of any optimizer: resting parameters of the group get masters.

        Args:
            param_group: parameters and options.
        """
        if self._inner is None:  # torch's own constructor calls it
            super().add_param_group(param_group)
            return
        group = self._trained(_groups([param_group])[0], {})
        super().add_param_group(group)
        self._inner.add_param_group(self._over_masters(self.param_groups[-1]))

    def _follow(self) -> None:
        """Before masters are saved or copied: they are those of the weights' values."""
        for slot in self._slots.values():
            slot.follow()

    def _push(self) -> None:
        """Options and state to the inner optimizer: here is where others read and write them."""
        for mine, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update((k, v) for k, v in mine.items() if k not in _OF_PARAMETERS)
        self._inner.state.clear()
        for key, value in self.state.items():
            slot = self._slots.get(key)
            if slot is None:
                self._inner.state[key] = value
            elif moments := {k: v for k, v in value.items() if k not in (MASTER, CASTS)}:
                self._inner.state[slot.master] = moments

    def _pull(self, begun: bool = False) -> None:
        """And back. Before the first step there is no state at all, as in any optimizer (unless it
        counts as `begun`): checkpoints tell by it that they must make the moments to load into."""
        begun = begun or bool(self._inner.state) or any(s.casts for s in self._slots.values())
        for mine, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            mine.update((k, v) for k, v in inner.items() if k not in _OF_PARAMETERS)
        self.state.clear()
        masters = {slot.master for slot in self._slots.values()}
        for parameter, slot in self._slots.items() if begun else ():
            self.state[parameter] = {**self._inner.state.get(slot.master, {}), **slot.extras}
        self.state.update((k, v) for k, v in self._inner.state.items() if k not in masters)

    # --- what a user asks ---------------------------------------------------------------------

    @property
    def masters(self) -> dict[str, Tensor]:
        """By name of the parameter: fp32, the memory that steps are taken in."""
        return {slot.name: slot.shown for slot in self._slots.values()}

    @property
    def sources(self) -> dict[str, str]:
        """By name: "kept" for masters that are the exact init values, else "resting"."""
        return {slot.name: slot.source for slot in self._slots.values()}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the optimizer on the masters; the weights are made from them.

        Args:
            closure: computes the loss again, as of any optimizer.

        Returns:
            The loss, if a closure gave one.
        """
        slots = list(self._slots.values())
        self._push()
        try:
            for slot in slots:
                slot.prepare()
            if closure is None:
                self._take_gradients()
                loss = self._inner.step()
            else:
                loss = self._inner.step(self._evaluated(closure))
            self._cast()
        finally:
            for slot in slots:
                slot.master.grad = None
            self._pull()
        return loss

    @torch.no_grad()
    def _take_gradients(self) -> None:
        for slot in self._slots.values():
            slot.take_gradient()

    @torch.no_grad()
    def _cast(self) -> None:
        """Makes the weights that have a gradient from their masters."""
        stepped = [slot for slot in self._slots.values() if slot.master.grad is not None]
        cast([slot.job(self._seed, self._via) for slot in stepped])
        for slot in stepped:
            slot.casts += 1
        for slot in self._slots.values():
            slot.settle()
            slot.loaded = False

    def _evaluated(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure over masters: an optimizer that calls it again has moved them meanwhile."""
        calls = 0

        def evaluate() -> Any:
            nonlocal calls
            if calls:
                self._cast()
            calls += 1
            with torch.enable_grad():
                loss = closure()
            self._take_gradients()
            return loss

        return evaluate

    @torch.no_grad()
    def fill_state(self) -> None:
        """Makes the moments before the first step, for a checkpoint to be loaded into.

        It is one step of the inner optimizer with zero gradients and a learning rate of 0.

        Raises:
            InvalidArgument: a step has been taken.
        """
        if self.state:
            raise InvalidArgument("MasterOptimizer: fill_state must come before the first step")
        self._push()
        every = [p for group in self._inner.param_groups for p in group["params"]]
        grads = [p.grad for p in every]
        for p in every:
            p.grad = torch.zeros_like(p)
        for group in self._inner.param_groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        self._inner.step()
        for mine, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner["lr"] = mine["lr"]
        for p, grad in zip(every, grads, strict=True):
            p.grad = grad
        self._pull()

    # --- checkpoints --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As of any optimizer, with the masters.

        The state of a resting parameter has its `master` and the number of its `casts` besides the
        moments, also before the first step. The master of a weight that somebody else has written
        is made again first.

        Returns:
            Options and states.
        """
        self._follow()
        self._push()
        self._pull(begun=True)
        try:
            return super().state_dict()
        finally:
            self._pull()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave.

        The weights are the model's to load, before or after: until the next step the masters count,
        whatever was written to the weights.

        Args:
            state_dict: options and states.
        """
        # The last hook before and the first one after: users' hooks see what was given, and what
        # has come of it. torch itself would round the moments to the parameters' dtype.
        hooks = (
            self.register_load_state_dict_pre_hook(lambda _, given: self._load(given)),
            self.register_load_state_dict_post_hook(lambda _: self._pull(), prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def _load(self, given: dict[str, Any]) -> dict[str, Any]:
        """Masters and moments; returns what is left for torch to load: options."""
        groups = given.get("param_groups", [])
        keys = [key for group in groups for key in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        states = {key: dict(state) for key, state in given.get("state", {}).items()}
        if "masters" in given:  # files of 0.1: by name, beside the state
            for key, parameter in zip(keys, parameters, strict=False):
                if (slot := self._slots.get(parameter)) and slot.name in given["masters"]:
                    extras = {MASTER: given["masters"][slot.name], CASTS: given.get("steps", 0)}
                    states.setdefault(key, {}).update(extras)
        found = {
            self._slots[parameter]: (state.pop(MASTER), int(state.pop(CASTS, 0)))
            for key, parameter in zip(keys, parameters, strict=False)
            if parameter in self._slots and MASTER in (state := states.get(key, {}))
        }
        self._check(found)
        moments = {key: state for key, state in states.items() if state}
        self._inner.load_state_dict({"state": moments, "param_groups": groups})
        for slot, (master, casts) in found.items():
            slot.load(master, casts)
        return {"state": {}, "param_groups": groups}

    def _check(self, found: dict[Slot, tuple[Tensor, int]]) -> None:
        wanted = sorted(slot.name for slot in self._slots.values())
        if len(found) != len(wanted):
            raise InvalidArgument(
                f"MasterOptimizer: the state must have masters of {wanted}, got "
                f"{sorted(slot.name for slot in found) or 'none'}"
            )
        for slot, (master, _) in found.items():
            if master.shape != slot.master.shape:
                raise InvalidArgument(
                    f"MasterOptimizer: the master of {slot.name} must be "
                    f"{list(slot.master.shape)}, got {list(master.shape)}"
                )


def _groups(params: Any) -> list[dict[str, Any]]:
    """As torch takes them, each with a list."""
    listed = list(params)
    if listed and isinstance(listed[0], dict):
        return [
            {**g, "params": [g["params"]] if isinstance(g["params"], Tensor) else list(g["params"])}
            for g in listed
        ]
    return [{"params": listed}]

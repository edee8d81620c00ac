# SPDX-License-Identifier: Apache-2.0
"""What modules are about to use of the stacks of matrices that they have in a file (experts): what
the numbers among a module's inputs say, and behind that what the next such module is likely to use,
by its own router. Both are hints, which cost a read where they are wrong, and change no result."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn

from stowage._model.choice.skips import ROUTERS
from stowage._model.weights import Held, Site
from stowage._ops import _torch
from stowage._ops.eager import eagerly
from stowage._shard.own_matrices import matrices_here
from stowage._tensor.products.wants import expect, used_together
from stowage._tensor.stowed import StowedTensor

_LOG = logging.getLogger("stowage")
_INTEGERS = (torch.int64, torch.int32)
_PATIENCE = 8  # uses in a row for which nothing had to be read: then nobody guesses what follows


class Routing:
    """A forward pre-hook: integers among the inputs are the numbers of the matrices to come. Where
    the module's products say so themselves, it looks at nothing. Pickles of models name it."""

    idle = 0  # uses in a row for which nothing had to be read

    def __init__(self, attributes: tuple[str, ...]) -> None:
        self._attributes = attributes

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        given = (*args, *kwargs.values()) if kwargs else args
        for numbers in given:
            if type(numbers) is torch.Tensor and numbers.dtype in _INTEGERS and numbers.is_cpu:
                if numbers.numel() and not _is_said(module, numbers):
                    eagerly(self._use, module, numbers, given)
                return

    def _use(self, module: nn.Module, numbers: torch.Tensor, given: Sequence[Any]) -> None:
        comes = self.expect(module, numbers)
        if comes is not None:
            self.idle = 0 if comes else self.idle + 1
        following = _following.get(module) if _following else None
        if following is not None and not module.training:
            following.guess(numbers, [t for t in given if type(t) is torch.Tensor and t.is_cpu])

    def stacks(self, module: nn.Module) -> list[tuple[StowedTensor, int]]:
        """What is here of each, and the number of the first matrix of it."""
        every = [getattr(module, name, None) for name in self._attributes]
        found = (matrices_here(stack) for stack in every if stack is not None)
        return [here for here in found if here is not None]

    def here(self, module: nn.Module) -> int:
        stacks = self.stacks(module)
        return len(stacks[0][0]) if stacks else 0

    def expect(
        self, module: nn.Module, numbers: torch.Tensor, *, after: bool = False
    ) -> bool | None:
        """As `wants.expect`, of the module's stacks. Of matrices that are spread over processes
        those are expected that are here: others' tokens may take more of them."""
        stacks, picked = self.stacks(module), _distinct(numbers)
        if stacks and stacks[0][0] is not getattr(module, self._attributes[0], None):
            first, count = stacks[0][1], len(stacks[0][0])
            picked = [n - first for n in picked if first <= n < first + count]
        return expect(
            [stack for stack, _ in stacks],
            picked,
            one_by_one=_takes_experts_in_turn(module),
            after=after,
        )


def _distinct(numbers: torch.Tensor) -> list[int]:
    """Of the few of a token, by Python alone, in a sixth of the time."""
    if numbers.numel() > 64:
        return cast("list[int]", numbers.unique().tolist())
    return sorted(set(numbers.flatten().tolist()))


class _Experts(Protocol):
    """Those of a layer, as the layer before knows them."""

    idle: int  # as of Routing

    def here(self, module: nn.Module) -> int:
        """How many of them this process has."""

    def expect(
        self, module: nn.Module, numbers: torch.Tensor, *, after: bool = False
    ) -> bool | None: ...


class Following:
    """The module whose experts are used after those of another one, and its router, which is asked
    about the other's input: what layers add to that changes little of which experts it picks."""

    def __init__(self, router: nn.Module, module: nn.Module, experts: _Experts) -> None:
        self._router, self._module, self._experts = router, module, experts
        self._refused = False

    def guess(self, picked: torch.Tensor, given: Sequence[torch.Tensor]) -> None:
        """`picked`: the numbers of the module before, `given` its inputs on the CPU. Not for many
        tokens, which reach most experts anyway, nor where something follows the operations."""
        hidden = next((t for t in given if t.is_floating_point() and t.dim() >= 2), None)
        if self._refused or hidden is None or self._experts.idle >= _PATIENCE:
            return
        if _is_followed() or 2 * picked.numel() > self._experts.here(self._module):
            return
        try:
            with torch.no_grad():  # and without its hooks: nobody asked it
                numbers = _numbers(self._router.forward(hidden), picked.shape[-1])
        except Exception as error:  # another's code, which takes another input
            _LOG.info("stowage: %s is not asked ahead: %s", type(self._router).__name__, error)
            self._refused = True
            return
        self._experts.expect(self._module, numbers, after=True)


def _is_followed() -> bool:
    """Whether something follows the operations, and would see ours."""
    return bool(_torch.functorch_active() or _torch.len_torch_dispatch_stack())


# By the module before. Not part of modules, whose copies would have all that follow.
_following: WeakKeyDictionary[nn.Module, Following] = WeakKeyDictionary()


def forget_following(model: nn.Module) -> None:
    for module in model.modules():
        _following.pop(module, None)


def _numbers(found: Any, count: int) -> torch.Tensor:
    """What a router picked: the integers of its result, else the most likely of each row."""
    every = found if isinstance(found, tuple) else (found,)
    for tensor in every:
        if tensor.dtype in _INTEGERS:
            return tensor
    return every[0].topk(count).indices


# Ways of transformers that take all experts of a stack in one product, which says which they are.
_TOGETHER = ("grouped_mm", "batched_mm")


def _way_of(module: nn.Module) -> str | None:
    """Modules of transformers say which way of theirs they go. Asked for each use: not by the
    property of their config, which takes 3 us."""
    says = getattr(module.__dict__.get("config"), "__dict__", {})
    way: str | None = says.get("_experts_implementation_internal")
    return way or says.get("_experts_implementation")


def _is_said(module: nn.Module, numbers: torch.Tensor) -> bool:
    """Whether the first product says as much: of one expert it says nothing, as in loops."""
    return not _following and numbers.numel() > 1 and _way_of(module) in _TOGETHER


def _takes_experts_in_turn(module: nn.Module) -> bool:
    """Whether all of an expert comes before the next one, as in loops over them."""
    return _way_of(module) in (None, "eager")


def _router_of(site: Site) -> nn.Module | None:
    """The router beside a module of experts, as models call theirs."""
    return _router_in(site.around[-1]) if site.around else None


def _router_in(module: nn.Module) -> nn.Module | None:
    children = dict(module.named_children())
    return next((children[name] for name in ROUTERS if name in children), None)


def attach_routing(weights: Iterable[Held], *, ahead: bool) -> list[Any]:
    """The hooks of the modules that have the experts among these, or pick them, in the order in
    which they are used. `ahead`: routers are asked about the input of the one before, until
    `forget_following`. To be removed with the engine."""
    every = list(weights)
    of_module, picks = _of_modules(every), _of_lists(every)
    for module, (_, hook) in of_module.items():
        used_together([stack for stack, _ in hook.stacks(module)])
    if ahead:
        routers = {module: _router_of(site) for module, (site, _) in of_module.items()}
        hooks = {module: hook for module, (_, hook) in of_module.items()}
        if not _follow(hooks, routers) + _follow(picks, {router: router for router in picks}):
            _LOG.warning(
                "stowage: route_ahead has no effect: no experts of which each comes by itself "
                "follow others, with a module %s beside them",
                " or ".join(ROUTERS),
            )
    return [
        *(m.register_forward_pre_hook(h, with_kwargs=True) for m, (_, h) in of_module.items()),
        *(router.register_forward_hook(hook) for router, hook in picks.items()),
    ]


def _of_modules(weights: Iterable[Held]) -> dict[nn.Module, tuple[Site, Routing]]:
    """The hooks of modules that have stacks, and a place of one."""
    sites: dict[nn.Module, list[Site]] = {}
    for held in weights:
        for site in held.sites if held.is_stack else ():
            sites.setdefault(site.module, []).append(site)
    return {
        module: (its[-1], Routing(tuple(site.attribute for site in its)))
        for module, its in sites.items()
    }


def _follow(
    hooks: Mapping[nn.Module, _Experts], routers: Mapping[nn.Module, nn.Module | None]
) -> int:
    """How many are asked about the input of the one before."""
    asked = 0
    for one, following in pairwise(hooks):
        router = routers[following]
        if router is not None:
            _following[one] = Following(router, following, hooks[following])
            asked += 1
    return asked


# --- experts that are modules of a list -----------------------------------------------------------

_COUNTS = [  # what models call the number of experts that a token takes
    "top_k",
    "topk",
    "moe_top_k",
    "moe_topk",
    "k",
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "num_activated_experts",
    "n_activated_experts",
    "num_selected_experts",
]


@dataclass(frozen=True)
class _Listed:
    """A list of experts, its router, and how many of them a token takes, if that is known."""

    experts: nn.ModuleList
    router: nn.Module
    count: int | None


def _list_of(held: Held) -> _Listed | None:
    """The list of experts that has the weight, beside a router whose answers tell what it picks: of
    scores alone nothing is known where nobody says how many."""
    site = held.sites[0]
    if held.tensor.dim() != 2 or len(held.sites) != 1:
        return None
    chain = (*site.around, site.module)
    for outer, inner in pairwise(chain[:-1]):
        if isinstance(inner, nn.ModuleList) and len(inner) > 1:
            names = [name for name, child in outer.named_children() if child is inner]
            router = _router_in(outer)
            if router is not None and any("expert" in name for name in names):
                count = _picked_by(outer, router)
                if count is not None or not isinstance(router, nn.Linear):
                    return _Listed(inner, router, count)
    return None


def is_listed(held: Held) -> bool:
    """Whether it is a matrix of one expert of a list, as models of Mixtral's kind have them."""
    return _list_of(held) is not None


class Picks:
    """A forward hook of a router: the weights of the experts that it picks are used next. Pickles
    of models name it."""

    idle = 0  # as of Routing

    def __init__(self, experts: nn.ModuleList, count: int | None) -> None:
        self._experts, self._count = experts, count

    def __call__(self, module: nn.Module, args: tuple[Any, ...], found: Any) -> None:
        if not torch.compiler.is_compiling() and not _is_followed():
            eagerly(self._use, module, args, found)

    def _use(self, module: nn.Module, args: tuple[Any, ...], found: Any) -> None:
        every = found if isinstance(found, tuple | list) else (found,)
        given = tuple(t for t in every if type(t) is torch.Tensor and t.is_cpu and t.dim() > 0)
        says = any(t.dtype in _INTEGERS for t in given)
        if not given or not (says or self._likely(given[0])):
            return
        numbers = _numbers(given, self._count or 1)
        comes = self.expect(module, numbers)
        if comes is not None:
            self.idle = 0 if comes else self.idle + 1
        following = _following.get(module)
        if following is not None and not module.training:
            following.guess(numbers, [t for t in args if type(t) is torch.Tensor and t.is_cpu])

    def _likely(self, scores: torch.Tensor) -> bool:
        """Whether the largest of the last dim tell who is picked."""
        many = scores.is_floating_point() and scores.shape[-1] == len(self._experts)
        return self._count is not None and many and self._count <= len(self._experts)

    def here(self, module: nn.Module) -> int:
        return len(self._experts)

    def expect(
        self, module: nn.Module, numbers: torch.Tensor, *, after: bool = False
    ) -> bool | None:
        """As `wants.expect`, of all matrices of each of these experts."""
        picked = [n for n in _distinct(numbers) if 0 <= n < len(self._experts)]
        weights = [weight for n in picked for weight in self._experts[n].parameters()]
        return expect(weights, [0], after=after)


def _of_lists(weights: Iterable[Held]) -> dict[nn.Module, Picks]:
    """The hooks of the routers beside lists."""
    every = (_list_of(held) for held in weights)
    lists = {listed.experts: listed for listed in every if listed is not None}
    return {each.router: Picks(each.experts, each.count) for each in lists.values()}


def _picked_by(*modules: nn.Module) -> int | None:
    """How many experts a token takes, by what models call it."""
    owners = [o for m in modules for o in (m, getattr(m, "config", None)) if o is not None]
    every = (getattr(owner, name, None) for owner in owners for name in _COUNTS)
    return next((n for n in every if type(n) is int and n > 0), None)

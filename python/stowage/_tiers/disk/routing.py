# SPDX-License-Identifier: Apache-2.0
"""What a module is about to use of the stacks of matrices that it has in a file (experts), told
from the numbers among its inputs: a hint, which costs a read where it is wrong, and changes no
result."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from stowage._model.weights import Held
from stowage._ops.eager import eagerly
from stowage._tensor.products.wants import expect
from stowage._tensor.stowed import StowedTensor

_INTEGERS = (torch.int64, torch.int32)


class Routing:
    """A forward pre-hook: integers among the inputs are the numbers of the matrices to come.
    Pickles of models name it."""

    def __init__(self, attributes: tuple[str, ...]) -> None:
        self._attributes = attributes

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        given = (t for t in (*args, *kwargs.values()) if type(t) is torch.Tensor)
        numbers = next((t for t in given if t.dtype in _INTEGERS and t.is_cpu), None)
        if numbers is not None and numbers.numel():
            eagerly(self._expect, module, numbers)

    def _expect(self, module: nn.Module, numbers: torch.Tensor) -> None:
        every = [getattr(module, name, None) for name in self._attributes]
        stacks = [stack for stack in every if isinstance(stack, StowedTensor)]
        expect(stacks, numbers.unique().tolist(), one_by_one=_takes_experts_in_turn(module))


def _takes_experts_in_turn(module: nn.Module) -> bool:
    """Whether all of an expert comes before the next one, as in loops over them; modules of
    transformers say which way of theirs they go."""
    way = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return way in (None, "eager")


def attach_routing(stacks: Iterable[Held]) -> list[Any]:
    """The hooks of the modules that have these. To be removed with the engine."""
    of_module: dict[nn.Module, list[str]] = {}
    for held in stacks:
        for site in held.sites:
            of_module.setdefault(site.module, []).append(site.attribute)
    return [
        module.register_forward_pre_hook(Routing(tuple(attributes)), with_kwargs=True)
        for module, attributes in of_module.items()
    ]

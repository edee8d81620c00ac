# SPDX-License-Identifier: Apache-2.0
"""Models that rest from the start: modules made in the context come out with stowed, trainable
weights, and their exact init values are kept if asked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from stowage._model.choice.policy import Policy
from stowage._model.choice.selection import WEIGHT_TYPES
from stowage._model.sizes import byte_count
from stowage._model.weights import LAZY
from stowage._ops.errors import InvalidArgument
from stowage._ops.storage import Storage
from stowage._shard.replacement import note
from stowage._tensor.requantize import first_parts
from stowage._tensor.stowed import StowedTensor, wrap
from stowage.training.init.origin import Home, Origin, Terms, activate, active, deactivate

Filter = Callable[[str, nn.Module, nn.Parameter], "bool | str | None"]
UNTIL = ("first_step", "first_forward")


@contextmanager
def quantized_init(
    storage: str | Storage | Policy | None,
    *,
    preserve_init: bool = False,
    master_first: bool = False,
    until: Literal["first_step", "first_forward"] = "first_step",
    budget: int | str | None = None,
    spill: str | os.PathLike[str] | None = None,
    spill_budget: int | str | None = None,
    filter: Filter | None = None,
    exact: bool = False,
) -> Iterator[None]:
    """Modules made inside rest as `storage` from the start, and stay trainable (`MasterOptimizer`).

    Every in-place init inside the context works on exact values, with the random numbers that it
    draws without the context, and the resting form is made from them. What is kept ends with
    MasterOptimizer's first step. Other threads see no context.

    Args:
        storage: how weights rest, or a `stowage.Policy` of a storage and `exact`; None switches an
            outer context off.
        preserve_init: keeps the exact values, on the host: `init_value`, `take_init_value`.
        master_first: keeps them in fp32 on the weight's device: inits run on what becomes the
            master.
        until: "first_step", or "first_forward": they end at the first forward of their module.
        budget: bytes of them in memory (an int, or "2GiB").
        spill: a folder for what does not fit; without a budget all of it.
        spill_budget: bytes of them in that folder.
        filter: given a name, the module that gets a parameter of that name, and the parameter, says
            whether it rests, or the storage; without, the `weight` of every Linear, Embedding and
            convolution of two or more dimensions does.
        exact: as in `stowage.quantize`.

    Returns:
        A context manager.

    Raises:
        InvalidArgument: arguments that do not go together, values that do not fit the budgets, and
            at the end weights that are not finite. After any exception nothing is kept.

    Example:
        >>> with stowage.training.quantized_init("f8_e4m3:row"):
        ...     layer = nn.Linear(64, 64)
        >>> layer.weight.resting, layer.weight.requires_grad
        ('f8_e4m3:row', True)
    """
    if isinstance(storage, Policy):
        policy = Policy.of(storage, "quantized_init", exact=exact)
        storage, exact = _only_storage(policy), policy.exact
    if until not in UNTIL:
        raise InvalidArgument(f"quantized_init: until must be one of {UNTIL}, got {until!r}")
    keeps = preserve_init or master_first
    if not keeps and (budget is not None or spill is not None or spill_budget is not None):
        raise InvalidArgument("quantized_init: a budget or spill must come with preserve_init=True")
    if master_first and spill is not None:
        raise InvalidArgument("quantized_init: master_first must come without spill, got both")
    if spill_budget is not None and spill is None:
        raise InvalidArgument("quantized_init: spill_budget must come with spill=folder")
    terms = Terms(
        keeps,
        master_first=master_first,
        budget=None if budget is None else byte_count(budget, "quantized_init: budget"),
        spill=None if spill is None else Path(spill),
        spill_budget=None if spill_budget is None else byte_count(spill_budget, "spill_budget"),
    )
    if storage is None:
        token = activate(None)
        try:
            yield
        finally:
            deactivate(token)
        return
    work = _Making(Storage(storage), terms, filter or _default, exact, until == "first_forward")
    with _running(work):
        yield


def _only_storage(policy: Policy) -> Storage:
    """A module in the making has no name in a model that rules could match."""
    candidates = policy.only("quantized_init", "storage", "exact").selection.default
    if len(candidates) > 1 or candidates[0] is None:
        raise InvalidArgument(f"quantized_init: storage must be one, got {policy.storage}")
    return candidates[0]


@contextmanager
def _running(work: _Making) -> Iterator[None]:
    terms = work.terms
    hooks = (
        register_module_parameter_registration_hook(work.register),
        register_module_module_registration_hook(work.registered),
    )
    token = activate(terms)
    try:
        yield
        terms.close()
        if problems := terms.unfinished():
            raise InvalidArgument(
                "quantized_init: init values must be finite when the context ends, got inf or NaN "
                "in " + ", ".join(problems)
            )
    except BaseException:
        for origin in list(terms.origins):
            origin.clear("when an exception ended quantized_init")
        terms.close()
        raise
    finally:
        deactivate(token)
        for hook in hooks:
            hook.remove()


def _default(name: str, module: nn.Module, parameter: nn.Parameter) -> bool:
    return isinstance(module, WEIGHT_TYPES) and name == "weight" and parameter.dim() > 1


class _Making:
    """Turns parameters into resting ones as modules register them."""

    def __init__(
        self, storage: Storage, terms: Terms, filter: Filter, exact: bool, forward: bool
    ) -> None:
        self.storage, self.terms, self.filter = storage, terms, filter
        self.exact, self.forward = exact, forward
        self._module: nn.Module | None = None
        self._home = Home()

    def register(self, module: nn.Module, name: str, parameter: Any) -> Any:
        if active() is not self.terms or not self._may_rest(parameter):
            return None
        wish = self.filter(name, module, parameter)
        if not wish:
            return None
        storage = Storage(wish) if isinstance(wish, str) else self.storage
        storage = storage.for_values(parameter.dtype)
        if rule := storage.misfit(parameter.shape):
            raise InvalidArgument(f"quantized_init: {type(module).__name__}.{name}: {rule}")
        with torch.inference_mode(False), torch.no_grad():
            made = self._made_of(parameter, module, name, storage)
        note(module, name, parameter if made is None else made)
        return made

    def registered(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        """A module has been made: what is open is put away before the next one takes memory."""
        if active() is self.terms:
            self.terms.close()

    def _may_rest(self, parameter: Any) -> bool:
        return (
            isinstance(parameter, nn.Parameter)
            and not isinstance(parameter, (StowedTensor, *LAZY))
            and type(parameter) is nn.Parameter
            and parameter.is_floating_point()
            and bool(parameter.numel())
        )

    def _made_of(
        self, parameter: nn.Parameter, module: nn.Module, name: str, storage: Storage
    ) -> nn.Parameter | None:
        dtype = torch.float32 if self.terms.master_first else parameter.dtype
        nbytes = 0 if parameter.is_meta else parameter.numel() * dtype.itemsize
        title = f"{type(module).__name__}.{name} {list(parameter.shape)}"
        origin = Origin(self.terms, self._home_of(module), title, nbytes)  # may refuse
        self.terms.opens(origin)
        values = parameter.detach().to(dtype).contiguous()
        weight = wrap(
            _rest(values, storage), storage, tuple(parameter.shape), parameter.dtype, self.exact
        )
        if not parameter.is_meta:
            origin.initialised(values)
        weight._origin = origin
        made = nn.Parameter(weight, parameter.requires_grad)
        try:
            torch.utils.swap_tensors(parameter, made)
        except RuntimeError:  # somebody has a weak reference to it
            return made
        return None

    def _home_of(self, module: nn.Module) -> Home:
        if self._module is not module:
            self._module, self._home = module, Home()
            if self.forward and self.terms.keeps:
                module.register_forward_pre_hook(self._home)
        return self._home


def _rest(values: Tensor, storage: Storage) -> list[Tensor]:
    """Parts of the weight; of zeros while the memory holds what nobody has initialised yet."""
    if values.is_meta:
        layout = storage.layout(tuple(values.shape))
        return [torch.empty(sizes, dtype=dtype, device="meta") for _, dtype, sizes in layout]
    return first_parts(values, storage)

# SPDX-License-Identifier: Apache-2.0
"""The inventory of a model: its parameters and buffers, each once under all its names; what may be
done with one; and changing many of them as one step that is either done whole or undone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stowage._ops import _torch
from stowage._ops.memory import ensure_writable, note_copies
from stowage._ops.storage import Storage
from stowage._tensor.casts import _CODES
from stowage._tensor.stowed import StowedTensor

# Tensors of lazy modules that have not run yet: neither shape nor values.
LAZY = (nn.UninitializedParameter, nn.UninitializedBuffer)


@dataclass(frozen=True)
class Site:
    """One place where a module holds a tensor."""

    module: nn.Module
    path: str  # of the module, "" for the root
    attribute: str
    around: tuple[nn.Module, ...] = ()  # the modules that contain it, outermost first

    @property
    def name(self) -> str:
        return f"{self.path}.{self.attribute}" if self.path else self.attribute


_TABLES = (nn.Embedding, nn.EmbeddingBag)


# Where torch has modules that only hold others.
_USE_NOTHING = {nn.Module.__module__, nn.ModuleList.__module__}


@dataclass(frozen=True)
class Held:
    """A parameter or buffer with every place that holds it; more than one when it is tied."""

    tensor: torch.Tensor
    sites: tuple[Site, ...]

    @property
    def name(self) -> str:
        return self.sites[0].name

    @property
    def rests(self) -> bool:
        return isinstance(self.tensor, StowedTensor)

    @property
    def is_buffer(self) -> bool:
        return all(site.attribute in _torch.buffers(site.module) for site in self.sites)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(site.name for site in self.sites)

    @property
    def gives_rows(self) -> bool:
        """Whether only the rows that ids name are read: every module that has it is an embedding. A
        weight that is tied to any other kind is used whole."""
        return all(isinstance(site.module, _TABLES) for site in self.sites)

    @property
    def is_stack(self) -> bool:
        """Whether it is matrices [E, O, K] that modules use one by one, such as experts, as far as
        these tell: torch's own modules, and what is made of them, use all of a weight."""
        if self.tensor.dim() != 3 or self.is_buffer:
            return False
        kinds = {kind.__module__ for site in self.sites for kind in type(site.module).__mro__}
        return not any(kind.startswith("torch.nn.") for kind in kinds - _USE_NOTHING)


def is_persistent(held: Held) -> bool:
    """Whether a buffer goes into `state_dict()`."""
    return any(s.attribute not in _torch.non_persistent(s.module) for s in held.sites)


class Inventory:
    """The parameters and buffers of a model as they are now, each once under all its names, in the
    order of `model.named_parameters()`.

    Whoever is asked for something of a model makes one and hands it down in the model's place;
    whoever has put other tensors there makes another.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = dict(model.named_modules(remove_duplicate=False))  # by all their paths
        self.parameters = self._each(_torch.parameters)
        self.buffers = self._each(_torch.buffers)

    def _each(self, of: Callable[[nn.Module], dict[str, Tensor | None]]) -> list[Held]:
        found: dict[int, tuple[Tensor, list[Site]]] = {}
        chains: dict[str, tuple[nn.Module, ...]] = {}  # a module, and those that contain it
        for path, module in self.modules.items():
            around = chains.get(path.rpartition(".")[0], ()) if path else ()
            chains[path] = (*around, module)
            for attribute, tensor in of(module).items():
                if tensor is not None:
                    _, sites = found.setdefault(id(tensor), (tensor, []))
                    sites.append(Site(module, path, attribute, around))
        return [Held(tensor, tuple(sites)) for tensor, sites in found.values()]

    @property
    def every(self) -> list[Held]:
        """Parameters, then buffers, persistent or not."""
        return self.parameters + self.buffers

    @property
    def written(self) -> list[Held]:
        """What a file holds of the model: parameters and persistent buffers."""
        return self.parameters + [held for held in self.buffers if is_persistent(held)]

    @property
    def ties(self) -> dict[str, str]:
        """The further names of tied tensors, each with the one that its tensor is written under."""
        return {name: held.name for held in self.written for name in held.names[1:]}


@dataclass
class Swap:
    """New tensors for many places of a model. Nothing changes before `commit`, and an exception
    during `commit` puts everything back."""

    _places: list[tuple[Site, torch.Tensor]] = field(default_factory=list)
    _values: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    _filled: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def put(self, held: Held, tensor: torch.Tensor) -> None:
        """Gives every place of `held` the one new tensor, so that ties stay ties. A buffer stays
        a buffer, whatever comes."""
        if held.is_buffer and isinstance(tensor, nn.Parameter):
            tensor = tensor.detach()
            if isinstance(tensor, StowedTensor):
                tensor.stay()
        self._places.extend((site, tensor) for site in held.sites)

    def fill(self, held: Held, made: torch.Tensor) -> torch.Tensor:
        """Has the tensor that is there take what `made` holds, as `copy_` does: the object stays,
        with its gradient, hooks and attributes, and so does every place that holds it. Where it
        cannot (it is plain and `made` rests, or it has no memory), `made` takes its place. Returns
        the one that will be there; `made` must have memory of its own."""
        old = held.tensor
        fits = isinstance(old, StowedTensor) == isinstance(made, StowedTensor)
        if old.is_meta or isinstance(old, LAZY) or old.is_inference() or not fits:
            self.put(held, made)
            return made
        if isinstance(old, StowedTensor) or old.dtype is made.dtype:
            self._filled.append((old, made))
        else:
            self.put_values(old, made.detach().to(old.device))
        return old

    def put_values(self, parameter: torch.Tensor, values: torch.Tensor) -> None:
        """Gives a Parameter new values and dtype. The object stays, as under `module.to()`:
        optimizers hold on to it."""
        self._values.append((parameter, values))
        if parameter.grad is not None:
            self._values.append((parameter.grad, parameter.grad.detach().to(values.dtype)))

    def commit(self) -> None:
        undo: list[Callable[[], Any]] = []
        try:
            for site, tensor in self._places:
                old = getattr(site.module, site.attribute)
                undo.append(partial(setattr, site.module, site.attribute, old))
                setattr(site.module, site.attribute, tensor)
            for target, values in self._values:
                undo.append(partial(setattr, target, "data", target.data))
                target.data = values
            for old, made in self._filled:
                undo.append(_fill(old, made))
            note_copies()
        except BaseException:
            for step in reversed(undo):
                step()
            raise


@torch.no_grad()
def _fill(old: torch.Tensor, made: torch.Tensor) -> Callable[[], Any]:
    """Puts into `old` what `made` holds; returns what undoes it. The two change places, so that no
    more than one tensor is there twice."""
    if isinstance(old, StowedTensor) and isinstance(made, StowedTensor):
        if (old._storage, old._exact, old._dt) != (made._storage, made._exact, made._dt):
            before = old.detach()
            old.data = made.detach().to(old.device)
            return partial(setattr, old, "data", before)
    else:
        ensure_writable(old)
    kept = made.detach().clone()
    made.detach().copy_(old)
    old.copy_(kept)
    return partial(_fill, old, made)


LEAST = 1 << 16  # bytes of a plain parameter that is worth fetching when it is used


def worth_offloading(held: Held, dtype: torch.dtype) -> bool:
    """Whether a parameter with plain values of `dtype` can rest, and is big enough."""
    if held.is_buffer or dtype not in _CODES or not 2 <= held.tensor.dim() <= 5:
        return False
    return held.tensor.numel() * dtype.itemsize >= LEAST


def can_be_fetched(held: Held) -> bool:
    """Whether a tensor may wait elsewhere than where it is used: a resting matrix, or a plain
    parameter that can rest as a cast of itself."""
    return held.tensor.dim() >= 2 if held.rests else worth_offloading(held, held.tensor.dtype)


def is_fetched_whole(held: Held) -> bool:
    """Whether some module uses all of it: of a table that is not tied, rows are used."""
    return can_be_fetched(held) and not held.gives_rows


Candidates = tuple[Storage | None, ...]


_TENSORS = "_stowage_tensors"  # attribute of a module: of stacks in pieces their tensors


def note_tensors(held: Held, count: int) -> None:
    """Of how many tensors the file makes a stack that a model on the meta device has of it."""
    for site in held.sites:
        if count or _TENSORS in site.module.__dict__:
            site.module.__dict__.setdefault(_TENSORS, {})[site.attribute] = count


def tensors_of_index(held: Held) -> int:
    """Of how many an index of dim 0 is made, which come through scratch; 0 of a stack that lies
    whole."""
    site = held.sites[0]
    count = site.module.__dict__.get(_TENSORS, {}).get(site.attribute, 0)
    return int(count // max(1, held.tensor.shape[0]))


@dataclass(frozen=True)
class Choice:
    """What a policy says about one tensor: a storage, or the reason why it stays plain.

    Where several storages were given, `storage` is the first and `others` are the rest.

    Example:
        >>> weight, bias, *_ = stowage.Policy("nf4").choose(model)
        >>> weight.storage.name, bias.reason
        ('nf4:block64', 'the defaults take parameters named weight, this is bias')
    """

    held: Held  # the tensor, with its places in the model
    storage: Storage | None
    reason: str  # why it is so
    others: Candidates = ()

    @property
    def candidates(self) -> Candidates:
        """The storages that were given, the first one first."""
        return () if self.storage is None else (self.storage, *self.others)

# SPDX-License-Identifier: Apache-2.0
"""The parameters and buffers of a model, each once under all its names, and changing many of them
as one step that is either done whole or undone.

Stamps of tensors: 64 bits that tell whether any byte has changed since, wherever it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
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
_WORDS = 1 << 16  # of 4 bytes, at once
_STEP = 6364136223846793005  # odd, so that no word of an earlier block is lost
_MODULUS = 1 << 64


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


def _group(model: nn.Module, dictionary: str) -> list[Held]:
    sites: dict[int, list[Site]] = {}
    tensors: dict[int, torch.Tensor] = {}
    chains: dict[str, tuple[nn.Module, ...]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        around = chains.get(path.rpartition(".")[0], ()) if path else ()
        chains[path] = (*around, module)
        for attribute, tensor in getattr(module, dictionary).items():
            if tensor is not None:
                tensors[id(tensor)] = tensor
                sites.setdefault(id(tensor), []).append(Site(module, path, attribute, around))
    return [Held(tensor, tuple(sites[key])) for key, tensor in tensors.items()]


def parameters(model: nn.Module) -> list[Held]:
    """Every parameter once, in the order of `model.named_parameters()`."""
    return _group(model, "_parameters")


def buffers(model: nn.Module) -> list[Held]:
    """Every buffer once, persistent or not."""
    return _group(model, "_buffers")


def is_persistent(held: Held) -> bool:
    """Whether a buffer goes into `state_dict()`."""
    return any(s.attribute not in _torch.non_persistent(s.module) for s in held.sites)


def values(model: nn.Module) -> Iterator[Held]:
    """Parameters, then buffers."""
    yield from parameters(model)
    yield from buffers(model)


def written(model: nn.Module) -> list[Held]:
    """What a file holds of a model: parameters and persistent buffers."""
    return parameters(model) + [held for held in buffers(model) if is_persistent(held)]


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
        if (old.storage, old._exact, old._dt) != (made.storage, made._exact, made._dt):
            before = old.detach()
            old.data = made.detach().to(old.device)
            return partial(setattr, old, "data", before)
    else:
        ensure_writable(old)
    kept = made.detach().clone()
    made.detach().copy_(old)
    old.copy_(kept)
    return partial(_fill, old, made)


LEAST = 1 << 16  # bytes of a plain parameter that is worth bringing when it is used


def worth_offloading(held: Held, dtype: torch.dtype) -> bool:
    """Whether a parameter with plain values of `dtype` can rest, and is big enough."""
    if held.is_buffer or dtype not in _CODES or not 2 <= held.tensor.dim() <= 5:
        return False
    return held.tensor.numel() * dtype.itemsize >= LEAST


def can_be_brought(held: Held) -> bool:
    """Whether a tensor may wait elsewhere than where it is used: a resting matrix, or a plain
    parameter that can rest as a cast of itself."""
    return held.tensor.dim() >= 2 if held.rests else worth_offloading(held, held.tensor.dtype)


def is_brought_whole(held: Held) -> bool:
    """Whether some module uses all of it: of a table that is not tied, rows are used."""
    return can_be_brought(held) and not held.gives_rows


Candidates = tuple[Storage | None, ...]


@dataclass(frozen=True)
class Choice:
    """What the policy says about one tensor: a storage, or the reason why it stays plain. Where
    several storages were given, `storage` is the first and `others` are the rest."""

    held: Held
    storage: Storage | None
    reason: str
    others: Candidates = ()

    @property
    def candidates(self) -> Candidates:
        return () if self.storage is None else (self.storage, *self.others)


@cache
def _factors() -> Tensor:
    made = torch.Generator().manual_seed(0x57077A6E)
    return torch.randint(-(2**63), 2**63 - 1, (_WORDS,), generator=made)


def stamp(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """One number for each tensor, of its bytes in order. Two contents that differ in known places
    have the same stamp with a probability of 2^-33: a sum of words times random factors, words of
    32 bits in 64. A sum without factors would not see that rows change places."""
    return tuple(_stamp(tensor.detach()) for tensor in tensors)


def _stamp(tensor: Tensor) -> int:
    if tensor.is_meta:
        return -1  # no values
    octets = tensor.contiguous().reshape(-1).view(torch.uint8).cpu()
    whole = octets.numel() // 4 * 4
    if octets.storage_offset() % 4:  # torch cannot look at these as words
        octets = octets.clone()
    words, total = octets[:whole].view(torch.int32), octets.numel()
    for first in range(0, len(words), _WORDS):
        block = words[first : first + _WORDS].to(torch.int64)
        total = (total * _STEP + int(torch.dot(block, _factors()[: len(block)]))) % _MODULUS
    for octet in octets[whole:].tolist():
        total = (total * _STEP + octet + 1) % _MODULUS
    return total

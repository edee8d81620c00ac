# SPDX-License-Identifier: Apache-2.0
"""What a merged tuner layer of PEFT keeps of its base, and taking its adapters out again by putting
that back."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from stowage._model.declared import adapter_paths
from stowage._model.rest.beside import Beside, Kept, keep
from stowage._model.sizes import memory
from stowage._model.stamps import stamp
from stowage._model.weights import Held, Inventory
from stowage._ops.errors import InvalidArgument
from stowage._tensor.requantize import Change
from stowage._tensor.stowed import StowedTensor

_MERGED = "_stowage_merged"  # attribute of a tuner layer: Beside, with the Record under ""
Stamp = tuple[int, ...]


@dataclass(frozen=True)
class Was:
    """A parameter of a base layer as it was before the merge."""

    kept: tuple[Kept, ...]  # codes and scales, or the one plain tensor
    before: Stamp
    after: Stamp


@dataclass(frozen=True)
class Record:
    """What one layer needs to take its adapters out again."""

    adapters: tuple[str, ...]
    earlier: tuple[str, ...]  # merged before, and not by us
    was: Mapping[str, Was]  # by the parameter's name in the base layer; only what has changed


def record_of(layer: BaseTunerLayer) -> Record | None:
    found: Record | None = layer.__dict__.get(_MERGED, {}).get("")
    return found


def set_record(layer: BaseTunerLayer, record: Record | None) -> None:
    """With a record, PEFT's own `layer.unmerge()` restores what is kept."""
    if record is None:
        layer.__dict__.pop(_MERGED, None)
        layer.__dict__.pop("unmerge", None)
    else:
        layer.__dict__[_MERGED] = Beside({"": record})
        layer.__dict__["unmerge"] = Unmerge(layer)


class Unmerge:
    """Stands in for the `unmerge` of one layer while it is merged: PEFT calls it from
    `unmerge_adapter`, and from a forward with the adapters disabled."""

    def __init__(self, layer: BaseTunerLayer) -> None:
        self._layer = layer

    def __call__(self) -> None:
        record = record_of(self._layer)
        if record is None:  # a pickle has none
            self._layer.__dict__.pop("unmerge", None)
            self._layer.unmerge()
        else:
            with torch.inference_mode(False), torch.no_grad():
                check_unwritten([("", self._layer, record)])
                restore(self._layer, record)


def base_parameters(layer: BaseTunerLayer) -> list[Held]:
    """The parameters that a merge may change; adapters of layers inside are none of them."""
    base = layer.get_base_layer()
    inner = adapter_paths(base)
    return [held for held in Inventory(base).parameters if held.sites[0].path not in inner]


def tensors_of(held: Held) -> list[torch.Tensor]:
    """What a parameter is made of."""
    return memory(held.tensor)


def part_names(prefix: str, held: Held) -> list[str]:
    return [f"{prefix}.{held.name}.{i}" for i in range(len(tensors_of(held)))]


def keep_layers(
    layers: Mapping[str, BaseTunerLayer], place: str, folder: str | os.PathLike[str] | None = None
) -> dict[str, Kept]:
    """Keeps every base parameter of these layers, in one file if they go to the disk. In memory
    they are copied, since a merge writes into the tensors that there are."""
    every = {}
    for prefix, layer in layers.items():
        for held in base_parameters(layer):
            for name, tensor in zip(part_names(prefix, held), tensors_of(held), strict=True):
                every[name] = tensor.clone() if place == "ram" else tensor
    return keep(every, place, folder)


def modules(layer: BaseTunerLayer) -> list[nn.Module]:
    """The layer, which PEFT declares as no Module, and all below."""
    assert isinstance(layer, nn.Module)
    return list(layer.modules())


def values(held: Held) -> torch.Tensor:
    """Of a parameter that rests, in fp32."""
    assert isinstance(held.tensor, StowedTensor)
    return held.tensor.dequantize(torch.float32)


@contextmanager
def bare(layer: BaseTunerLayer) -> Iterator[None]:
    """Without our methods: PEFT's `merge` may call `unmerge`, and those of layers inside."""
    taken = []
    for module in modules(layer):
        for method in ("merge", "unmerge"):
            if method in module.__dict__:
                taken.append((module, method, module.__dict__.pop(method)))
    try:
        yield
    finally:
        for module, method, ours in taken:
            module.__dict__[method] = ours


@contextmanager
def stand_ins(layer: BaseTunerLayer) -> Iterator[None]:
    """fp32 parameters in the places of the base weights that rest."""
    resting = [held for held in base_parameters(layer) if held.rests]
    try:
        for held in resting:
            _put(held, nn.Parameter(values(held), requires_grad=False))
        yield
    finally:
        for held in resting:
            _put(held, held.tensor)


def _put(held: Held, tensor: torch.Tensor) -> None:
    for site in held.sites:
        setattr(site.module, site.attribute, tensor)


def write(held: Held, tensors: list[torch.Tensor]) -> None:
    """Puts bytes into a parameter: the objects stay, so that ties, views and graphs follow."""
    if isinstance(held.tensor, StowedTensor):
        Change(held.tensor, tensors).commit()
    else:
        held.tensor.data.copy_(tensors[0])


def check_unwritten(records: list[tuple[str, BaseTunerLayer, Record]]) -> None:
    """Raises InvalidArgument for every weight that was written after its merge. `records` in the
    order in which they are restored: a tied weight may be merged into by two layers."""
    problems, now = [], dict[int, Stamp]()
    for name, layer, record in records:
        found = {held.name: held for held in base_parameters(layer)}
        for part, was in record.was.items():
            held = found.get(part)
            if held is None:
                problems.append(f"{name}.{part}: must still be there")
                continue
            state = now.get(id(held.tensor)) or stamp(tensors_of(held))
            if state != was.after:
                problems.append(f"{name}.{part}: must not be written after it was merged")
            now[id(held.tensor)] = was.before
    if problems:
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise InvalidArgument(f"stowage: cannot unmerge, nothing was changed:{lines}")


def restore(layer: BaseTunerLayer, record: Record) -> None:
    """Takes the adapters out: PEFT's own state by its own code, the weights from what is kept."""
    every = base_parameters(layer)
    plain = {h.name: h.tensor.detach().clone() for h in every if not h.rests}
    set_record(layer, None)
    with bare(layer), stand_ins(layer), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that unmerging is inexact: it is not
        # Only for what else PEFT keeps: the values it computes are thrown away, as is any error.
        with suppress(Exception):
            type(layer).unmerge(layer)
    layer.merged_adapters[:] = record.earlier
    for held in every:
        was = record.was.get(held.name)
        if was is not None:
            write(held, [kept.read() for kept in was.kept])
        elif held.name in plain:
            write(held, [plain[held.name]])

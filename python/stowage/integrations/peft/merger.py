# SPDX-License-Identifier: Apache-2.0
"""Merges adapters into the base of one tuner layer of PEFT, by PEFT's own code run on fp32
stand-ins of the weights that rest, whose values are then quantized whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from peft.tuners.tuners_utils import BaseTunerLayer

from stowage._model.reports.report import remember
from stowage._model.rest.beside import Kept
from stowage._model.rest.formation import Loss, measured
from stowage._model.stamps import stamp
from stowage._model.weights import Held
from stowage._ops import library
from stowage._ops.errors import translated
from stowage._ops.numbers import ordered, stochastic
from stowage._ops.storage import Storage
from stowage._tensor.stowed import StowedTensor
from stowage.integrations.peft.base import (
    Record,
    Was,
    bare,
    base_parameters,
    check_unwritten,
    keep_layers,
    part_names,
    record_of,
    restore,
    set_record,
    stand_ins,
    tensors_of,
    values,
    write,
)


@dataclass(frozen=True)
class How:
    """The options of a merge."""

    rounding: str = "nearest"
    seed: int = 0
    place: str = "ram"
    folder: str | os.PathLike[str] | None = None

    def parts(
        self, values: torch.Tensor, storage: Storage, name: str, old: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        groups = old[-1] if storage.actorder else None  # the order of columns stays
        if self.rounding == "stochastic":
            key = stochastic.key_of(self.seed, name)
            return stochastic.quantize(values, storage, key, groups=groups)
        try:
            if groups is not None:
                return ordered.quantize(values, storage, groups)
            return library.quantize(values.contiguous(), storage.key)
        except RuntimeError as error:
            raise translated(error) from None


def merge_layer(
    name: str,
    layer: BaseTunerLayer,
    how: How,
    adapters: list[str] | None,
    safe: bool = False,
    kept: Mapping[str, Kept] | None = None,
) -> Callable[[], None] | None:
    """Merges into one layer; returns what takes it back, or None if nothing has changed. What fails
    leaves the layer as it was. Adapters merged before by us are taken out and merged again with
    the new ones, so that the result is rounded once."""
    old = record_of(layer)
    asked = list(adapters if adapters is not None else layer.active_adapters)
    if old is None:
        _merge(name, layer, how, asked, safe, kept)
        new = record_of(layer)
        return None if new is None else partial(restore, layer, new)
    if not set(asked) - set(old.adapters):
        return None
    check_unwritten([(name, layer, old)])
    back = partial(_reinstate, name, layer, old, keep_layers({name: layer}, "ram"))
    restore(layer, old)
    try:
        every = [*old.adapters, *(a for a in asked if a not in old.adapters)]
        _merge(name, layer, how, every, safe, None)
    except BaseException:
        back()
        raise
    return back


def _reinstate(
    name: str, layer: BaseTunerLayer, record: Record, merged: Mapping[str, Kept]
) -> None:
    """Puts a layer back that was merged before."""
    for held in base_parameters(layer):
        write(held, [merged[n].read() for n in part_names(name, held)])
    layer.merged_adapters[:] = [*record.earlier, *record.adapters]
    set_record(layer, record)


def _merge(
    name: str,
    layer: BaseTunerLayer,
    how: How,
    adapters: list[str],
    safe: bool,
    kept: Mapping[str, Kept] | None,
) -> None:
    every, before_merge = base_parameters(layer), list(layer.merged_adapters)
    plain = {h.name: h.tensor.detach().clone() for h in every if not h.rests}
    stamps = {held.name: stamp(tensors_of(held)) for held in every}
    if kept is None:
        kept = keep_layers({name: layer}, how.place, how.folder)
    new: dict[str, list[torch.Tensor]] = {}
    losses: dict[str, Loss] = {}
    try:
        with bare(layer), stand_ins(layer):
            type(layer).merge(layer, safe_merge=safe, adapter_names=adapters)
            for held in every:
                if held.rests and not torch.equal(_there(held), values(held)):
                    full = f"{_without_wrappers(name)}.{held.name}"
                    wide, storage = _there(held).float(), _storage(held)
                    new[held.name] = how.parts(wide, storage, full, tensors_of(held))
                    losses[held.name] = measured(wide.contiguous(), new[held.name], storage)
        for held in every:
            if held.name in new:
                write(held, new[held.name])
    except BaseException:
        layer.merged_adapters[:] = before_merge
        for held in every:
            write(held, [plain[held.name]] if held.name in plain else _old(kept, name, held))
        raise
    was = {}
    for held in every:
        after = stamp(tensors_of(held))
        if after != stamps[held.name]:
            parts = tuple(kept[n] for n in part_names(name, held))
            was[held.name] = Was(parts, stamps[held.name], after)
    merged = tuple(a for a in layer.merged_adapters if a not in before_merge)
    if merged:
        set_record(layer, Record(merged, tuple(before_merge), was))
    for held in every:
        if held.name in losses:
            reason = "merged: " + ", ".join(layer.merged_adapters)
            remember(held, held.tensor, reason, losses[held.name], temporary=True)


def _old(kept: Mapping[str, Kept], name: str, held: Held) -> list[torch.Tensor]:
    return [kept[n].read() for n in part_names(name, held)]


def _without_wrappers(name: str) -> str:
    """The name that the layer has in the model that was adapted."""
    return name.removeprefix("base_model.model.")


def _there(held: Held) -> torch.Tensor:
    found: torch.Tensor = getattr(held.sites[0].module, held.sites[0].attribute)
    return found.detach()


def _storage(held: Held) -> Storage:
    assert isinstance(held.tensor, StowedTensor)
    return held.tensor._storage

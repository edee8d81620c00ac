# SPDX-License-Identifier: Apache-2.0
"""Checkpoints into models: `load_checkpoint_in_model` and `load_checkpoint_and_dispatch`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stowage._files.sources import DictSource, FileSource
from stowage._model.declared import WidePlaces
from stowage._model.files.fill import Filling, Options
from stowage._model.rest.formation import Making
from stowage._model.weights import Held, Inventory
from stowage._ops.errors import InvalidArgument, Unsupported, raise_problems
from stowage._tiers.disk.engine import Engine, EngineOptions, attach, suited
from stowage._tiers.maps.budgets import disk_budget
from stowage._tiers.maps.module_sizes import Dtype, torch_dtype
from stowage._tiers.offload import is_offloaded
from stowage.compat.accelerate._checkpoints import Checkpoint, source_of
from stowage.compat.accelerate._maps import (
    Sizes,
    get_balanced_memory,
    infer_auto_device_map,
    place_of,
)
from stowage.compat.accelerate._offloading import (
    Folder,
    accelerators_of,
    dispatch_model,
    to_folder,
)
from stowage.compat.accelerate.hooks import Names

_LOG = logging.getLogger("stowage")
_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
Map = Mapping[str, Any]


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: Checkpoint,
    device_map: Map | None = None,
    offload_folder: Folder | None = None,
    dtype: Dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: list[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Fills `model` from a checkpoint, in the model's dtypes or in `dtype`; what rests in the file
    rests in the model. Parts that `device_map` has on the disk stay in the safetensors files where
    these hold the dtypes that are wanted; else they are written to `offload_folder`.

    Raises InvalidArgument, with nothing changed, that lists all that is missing (with `strict`, or
    where a parameter would be left without values), unexpected (with `strict`), of wrong shape or
    without a device. `offload_state_dict` and `offload_buffers` have no effect."""
    _refuse(offload_8bit_bnb, broadcast_from_rank0)
    if "disk" in (device_map or {}).values() and offload_folder is None:
        raise InvalidArgument(
            "stowage.load_checkpoint_in_model: offload_folder must be given for what is on the "
            "disk, got None"
        )
    source = source_of(checkpoint)
    try:
        job = _Job(model, source, device_map or {"": "cpu"}, torch_dtype(dtype), strict)
        with _kept_wide(model, keep_in_fp32_modules, job.dtype):
            in_place = job.run()
    finally:
        if isinstance(source, FileSource):
            source.close()
    if device_map is not None:
        _place(model, device_map, None if in_place else offload_folder)


def _refuse(offload_8bit_bnb: bool, broadcast_from_rank0: bool) -> None:
    if offload_8bit_bnb:
        raise Unsupported(
            "stowage: offload_8bit_bnb must be False; for 8-bit weights call stowage.stow(model, "
            "'int8') or load a file that holds them"
        )
    if broadcast_from_rank0:
        raise Unsupported(
            "stowage: broadcast_from_rank0 must be False, each process reads the file"
        )


class _Job:
    """One load: what comes from where, and what stays in the file."""

    def __init__(
        self,
        model: nn.Module,
        source: FileSource | DictSource,
        device_map: Map,
        dtype: torch.dtype | None,
        strict: bool,
    ) -> None:
        self.model, self.source, self.dtype, self.strict = model, source, dtype, strict
        self._map = device_map

    def run(self) -> bool:
        """Fills the model; returns whether the parts for the disk rest in the file now."""
        on_disk = [held for held in Inventory(self.model).parameters if self._is_for_disk(held)]
        mapped = bool(on_disk) and all(self._is_as_wanted(held) for held in on_disk)
        in_place = mapped and not accelerators_of(self._map)  # else dispatch_model writes a folder
        if is_offloaded(self.model):
            raise InvalidArgument(
                "stowage.load_checkpoint_in_model: the model must not be offloaded, call "
                "stowage.onload(model) first"
            )
        options = Options(
            Making(self.dtype),
            mmap=mapped,
            cast=mapped,
            strict=self.strict,
            keep_dtypes=self.dtype is None,
            stays=lambda held: not self._is_for_disk(held),
        )
        with torch.inference_mode(False), torch.no_grad():
            filling = Filling(self.model, self.source, None, options)
            commit = filling.execute()
            self.source.check()
            problems = filling.problems + self._without_device()
            raise_problems(f"stowage.load_checkpoint_in_model: {self.source.where}", problems)
            engine = self._engine(filling) if in_place else None
            commit()
        if engine is not None:
            attach(self.model, engine, filling.moved().values())
        self._tell_of_leftovers()
        return in_place

    def _is_for_disk(self, held: Held) -> bool:
        return all(place_of(name, self._map) == "disk" for name in held.names)

    def _is_as_wanted(self, held: Held) -> bool:
        if not isinstance(self.source, FileSource):
            return False
        entry = next((e for n in held.names if (e := self.source.entries.get(n))), None)
        if entry is None or entry.storage is not None:
            return True
        return entry.dtype == (self.dtype or held.tensor.dtype)

    def _engine(self, filling: Filling) -> Engine | None:
        moved = filling.moved()
        if not moved:
            return None
        assert isinstance(self.source, FileSource)
        entries = self.source.entries
        budget = disk_budget([self.source.size(entries[name]) for name in moved])
        options = suited(EngineOptions(budget), self.source, moved)
        engine = Engine(self.source, options)
        engine.expect(moved)
        return engine

    def _without_device(self) -> list[str]:
        known = self._known()
        return [
            f"{name}: must have a device in device_map, has none"
            for name in self.source.entries
            if name in known and place_of(name, self._map) is None
        ]

    def _known(self) -> set[str]:
        return {name for held in Inventory(self.model).every for name in held.names}

    def _tell_of_leftovers(self) -> None:
        unused = sorted(self.source.entries.keys() - self._known())
        if unused:
            kind, names = type(self.model).__name__, ", ".join(unused)
            text = "%s: some weights of the checkpoint were not used when filling %s: %s"
            _LOG.warning(text, self.source.where, kind, names)


@contextmanager
def _kept_wide(
    model: nn.Module, names: list[str] | None, dtype: torch.dtype | None
) -> Iterator[None]:
    """What the model, or the caller, wants in fp32 comes in the dtype of the file, and is widened
    when it is there."""
    if names is None or dtype != torch.float16:
        yield
        return
    before = model.__dict__.get("_keep_in_fp32_modules")
    model.__dict__["_keep_in_fp32_modules"] = list(names)
    try:
        yield
        wide = WidePlaces(model)
        for held in Inventory(model).every:
            if held.tensor.is_floating_point() and wide.contain(held.name):
                held.tensor.data = held.tensor.data.float()
    finally:
        del model.__dict__["_keep_in_fp32_modules"]
        if before is not None:
            model.__dict__["_keep_in_fp32_modules"] = before


def _place(model: nn.Module, device_map: Map, offload_folder: Folder | None) -> None:
    """On one accelerator, or in the folder. What a map has on several places with an accelerator
    among them stays in memory: dispatch_model moves it."""
    accelerators = accelerators_of(device_map)
    if len(accelerators) == len(set(device_map.values())) == 1:
        model.to(accelerators[0])
    elif not accelerators and "disk" in device_map.values() and offload_folder is not None:
        to_folder(model, Path(offload_folder), torch.device("cpu"), device_map)


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: Checkpoint,
    device_map: str | Map | None = None,
    max_memory: Sizes | None = None,
    no_split_module_classes: Iterable[str] | None = None,
    offload_folder: Folder | None = None,
    offload_buffers: bool = False,
    dtype: Dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: Names = None,
    preload_module_classes: Iterable[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> nn.Module:
    """`load_checkpoint_in_model`, then `dispatch_model`. `device_map` may be "auto", "balanced",
    "balanced_low_0" or "sequential": then it is made from the sizes of the model and `max_memory`,
    or what is free. Raises as those two do, and InvalidArgument for another name."""
    if isinstance(device_map, str):
        if device_map not in _MAPS:
            raise InvalidArgument(
                f"stowage: device_map must be one of {', '.join(_MAPS)} or a map, got "
                f"{device_map!r}"
            )
        if device_map != "sequential":
            max_memory = get_balanced_memory(
                model,
                max_memory,
                no_split_module_classes,
                dtype,
                low_zero=device_map == "balanced_low_0",
            )
        device_map = infer_auto_device_map(
            model, max_memory, no_split_module_classes, dtype, offload_buffers=offload_buffers
        )
    load_checkpoint_in_model(
        model,
        checkpoint,
        device_map,
        offload_folder,
        dtype,
        strict=strict,
        broadcast_from_rank0=broadcast_from_rank0,
    )
    if device_map is None:
        return model
    return dispatch_model(model, device_map, offload_dir=offload_folder, skip_keys=skip_keys)

# SPDX-License-Identifier: Apache-2.0
"""Where the weights of a model are to be, by `device_map` and `max_memory` of transformers, `ram`
and `plan` of ours: devices are given to transformers, memory and disk are the engine's."""

from __future__ import annotations

import shutil
import tempfile
import warnings
import weakref
from typing import Any

import torch
from torch import nn
from transformers.integrations.accelerate import get_device

from stowage._model.sizes import nbytes
from stowage._ops.errors import Unsupported
from stowage._tiers.disk.engine import engine_of
from stowage._tiers.offload import offload
from stowage.integrations.transformers.config import StowageConfig

_NO_LIMIT = 1 << 62


class Destinations:
    """Of one load.

    Args:
        said: `ram`, `plan` and `folder`.
    """

    def __init__(self, said: StowageConfig) -> None:
        self._ram, self._plan, self._folder = said.ram, said.plan, said.folder
        self._on_disk: dict[str, str] = {}
        self._limit = _NO_LIMIT
        self._map: dict[str, Any] | None = None

    def taken(self, device_map: Any) -> Any:
        """What is left of a map without a disk."""
        if not isinstance(device_map, dict) or "disk" not in device_map.values():
            self.note(device_map)
            return device_map
        self._on_disk = {k: "disk" if v == "disk" else "ram" for k, v in device_map.items()}
        left = {name: "cpu" if place == "disk" else place for name, place in device_map.items()}
        self.note(left)
        return left

    def limited(self, max_memory: dict[Any, Any]) -> dict[Any, Any]:
        """Without the limit for the memory of the CPU, which is noted."""
        if "cpu" in max_memory:
            self._limit = int(max_memory["cpu"])  # a number by now
        return {**max_memory, "cpu": _NO_LIMIT}

    def note(self, device_map: Any) -> None:
        """What is known of it by now."""
        if isinstance(device_map, dict):
            self._map = device_map

    def device_of(self, name: str) -> torch.device:
        """Of a parameter."""
        place = get_device(self._map, name, valid_torch_device=True)
        return torch.device("cpu" if place is None else place)

    def of_file(self, resting: int) -> dict[str, Any]:
        """What a reader of a file with so many bytes of resting weights is told."""
        if self._plan is not None or self._ram is not None:
            self._check_alone("ram and plan")
            return {"ram": self._ram} if self._plan is None else {"plan": self._plan}
        over = resting > self._limit and not self._on_disk and not self._accelerators()
        return {"ram": self._limit} if over else {}

    def _accelerators(self) -> set[str]:
        every = map(str, (self._map or {}).values())
        return {place for place in every if place not in ("cpu", "disk", "meta")}

    def _check_alone(self, what: str) -> None:
        """Raises Unsupported where a part of the model is on an accelerator."""
        if there := self._accelerators():
            raise Unsupported(
                f"StowageConfig: {what} must come with a model on the CPU alone, device_map has "
                f"{', '.join(sorted(there))}; load it on the CPU, then take stowage.offload(model, "
                "device=..., accelerator=..., ram=...)"
            )

    def keep(self, model: nn.Module) -> None:
        """Leaves on the disk what is not in memory by then."""
        if engine_of(model) is not None:
            return
        held = sum(nbytes(p) for p in model.parameters() if p.device.type == "cpu")
        if self._on_disk:
            self._check_alone("places on the disk")
            two = 2 * max(map(nbytes, model.parameters()), default=0)  # one works, one comes
            ram = two if self._ram is None else self._ram
            offload(model, ram=ram, folder=self._made_folder(model), device_map=self._on_disk)
        elif self._ram is not None or held > self._limit:
            self._check_alone("a limit for the memory of the CPU that weights exceed")
            ram = self._limit if self._ram is None else self._ram
            offload(model, ram=ram, folder=self._made_folder(model))

    def _made_folder(self, model: nn.Module) -> Any:
        """The one that was given, or one that is gone with the model."""
        if self._folder is not None:
            return self._folder
        made = tempfile.mkdtemp(prefix="stowage-")
        warnings.warn(
            f"StowageConfig: {nbytes(model) >> 20} MiB of weights go to {made} until the model is "
            "gone; StowageConfig(ram=..., folder=...) chooses the place",
            stacklevel=2,
        )
        weakref.finalize(model, shutil.rmtree, made, ignore_errors=True)
        return made


class Placed:
    """What both libraries ask of a quantizer about places."""

    _destinations: Destinations

    def update_device_map(self, device_map: Any) -> Any:
        """Takes what is to be on a disk out of the map.

        Args:
            device_map: of `from_pretrained`.

        Returns:
            What is left for the library.
        """
        return self._destinations.taken(device_map)

    def adjust_max_memory(self, max_memory: dict[Any, Any]) -> dict[Any, Any]:
        """Takes the limit for the CPU's memory, which the engine keeps.

        Args:
            max_memory: of `from_pretrained`, or what is free.

        Returns:
            What is left for the library.
        """
        return self._destinations.limited(max_memory)

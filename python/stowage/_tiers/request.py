# SPDX-License-Identifier: Apache-2.0
"""What `offload` is asked for, and every reason to refuse it before anything changes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from stowage._model.sizes import byte_count, memory, nbytes, new_bytes
from stowage._model.weights import Held, can_be_fetched
from stowage._tensor.stowed import StowedTensor
from stowage._tiers.device.placement import ring_bytes
from stowage._tiers.disk.engine import EngineOptions
from stowage._tiers.places import CPU, Places, device_of_name, device_problems


def given_bytes(given: int | str | None, name: str) -> int | None:
    """Bytes of a size as users write it; None of none."""
    return None if given is None else byte_count(given, name)


@dataclass(frozen=True)
class Asked:
    """Arguments of `offload` that are about places and limits, as given."""

    ram: int | str | None
    folder: str | os.PathLike[str] | None
    device: str | torch.device
    accelerator: int | str | Mapping[str, int | str] | None
    pin: int | str
    options: EngineOptions

    @property
    def ram_bytes(self) -> int | None:
        return given_bytes(self.ram, "ram")

    @property
    def accelerator_bytes(self) -> int | None:
        if isinstance(self.accelerator, Mapping):
            return None
        return given_bytes(self.accelerator, "accelerator")

    @property
    def pin_bytes(self) -> int:
        return byte_count(self.pin, "pin")

    def problems(self, every: list[Held], places: Places) -> list[str]:
        """Why this cannot be. `every`: all parameters and buffers of the model."""
        found = self.options.problems() + device_problems(self.device)
        found += self._contradictions(places) + places.problems + places.split_ties(every)
        if not places.problems and places.all_devices():
            found += [
                f"the model must be on the CPU, {held.name} is on {held.tensor.device}"
                for held in every
                if held.tensor.device != CPU
            ][:1]
        if self.folder is not None and self.ram_bytes is not None:
            return found + _too_large(every, places, self.ram_bytes)
        return found if places.problems else found + self._beyond_ram(every, places)

    def ring(self, every: list[Held], places: Places) -> tuple[int, list[str]]:
        """Bytes of the ring, and why there can be none."""
        return ring_bytes(every, places, self.accelerator_bytes)

    def _contradictions(self, places: Places) -> list[str]:
        found: list[str] = []
        if isinstance(self.accelerator, Mapping):
            found.append(f"accelerator must be bytes where device_map is no name, got "
                         f"{self.accelerator!r}")  # fmt: skip
        if device_of_name(self.device) is None:
            return found
        if self.folder is not None and self.ram is None:
            found.append("ram must come with folder, the bytes of its weights to hold in memory")
        if self.folder is None and not places.all_devices():
            found.append(f"folder and ram must be given where device is {self.device}, got neither"
                         if self.ram is None else
                         f"folder must come with ram where device is {self.device}, got ram alone"
                         )  # fmt: skip
        if self.folder is None and self.options != EngineOptions(self.options.ram):
            found.append(
                "reads, workers, timeout, lock and route_ahead must come with folder, got none"
            )
        if self.options.route_ahead and places.home != CPU:
            found.append(f"route_ahead must come with a model on the CPU, got device={self.device}")
        for name, given in (("accelerator", self.accelerator), ("pin", self.pin or None)):
            if given is not None and places.home == CPU:
                found.append(f"{name} must come with a device, got {name}={given!r} and device="
                             f"{str(self.device)!r}")  # fmt: skip
        return found

    def _beyond_ram(self, every: list[Held], places: Places) -> list[str]:
        """What rests in memory, where that is more than it may be."""
        limit = self.ram_bytes
        if limit is None:
            return []
        resting = [h.tensor for h in every if _stays_in_ram(h, places)]
        size = new_bytes((part for tensor in resting for part in memory(tensor)), set())
        if size <= limit:
            return []
        return [
            f"ram must hold the {size} bytes of weights that rest there, got {limit}; with folder "
            "they rest on a disk"
        ]


def _stays_in_ram(held: Held, places: Places) -> bool:
    return places.work(held.name) == CPU or places.fetches(held)


def _too_large(every: list[Held], places: Places, budget: int) -> list[str]:
    """The largest weight that will move, where it alone exceeds the budget."""
    moving = [h for h in every if not places.stays(h) and _comes(h)]
    sizes = {held.name: _bytes_at_a_time(held) for held in moving}
    largest = max(sizes, key=sizes.__getitem__, default=None)
    if largest is None or (size := sizes[largest]) <= budget:
        return []
    return [f"ram must hold the largest weight, {largest} of {size} bytes, got {budget}"]


def _bytes_at_a_time(held: Held) -> int:
    """Of a stack one matrix is needed at a time, where these can come by themselves: the engine
    knows."""
    size = nbytes(held.tensor)
    return size // max(held.tensor.shape[0], 1) if held.is_stack else size


def _comes(held: Held) -> bool:
    """Whether a tensor comes into memory as a whole."""
    return (isinstance(held.tensor, StowedTensor) or can_be_fetched(held)) and not held.gives_rows

# SPDX-License-Identifier: Apache-2.0
"""Device maps by accelerate's names, for the limits that `offload` has."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

import torch

from stowage._model.sizes import byte_count, nbytes
from stowage._model.weights import Held, Inventory, can_be_fetched
from stowage._ops.errors import InvalidArgument, raise_problems
from stowage._tiers.maps.budgets import Device, balanced, disk_budget
from stowage._tiers.maps.first_fit import first_fit
from stowage._tiers.places import CPU, RAM, DeviceMap, Places, device_of_name, device_problems
from stowage._tiers.plans.plan import Plan, plan
from stowage._tiers.request import given_bytes

MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
_ALL = 1 << 62  # bytes of a place without a limit
Size = int | str
Folder = str | os.PathLike[str]


class Given(NamedTuple):
    """Arguments of `offload` about places and limits."""

    plan: Plan | str | os.PathLike[str] | None
    folder: Folder | None
    ram: Size | None
    device: str | torch.device | None
    accelerator: Size | Mapping[str, Size] | None
    device_map: DeviceMap | str | None


class Mapped(NamedTuple):
    """The same with a plan that is read, and a map of names."""

    plan: Plan | None
    folder: Folder | None
    ram: Size | None
    device: str | torch.device | None
    accelerator: Size | Mapping[str, Size] | None
    device_map: DeviceMap | None


def by_name(inventory: Inventory, given: Given) -> Mapped:
    """What `given.device_map`, a name, stands for: "auto" plans; "sequential" fills the
    accelerators, or without one `ram`, with modules in the order of definition, "balanced" by equal
    shares, "balanced_low_0" by shares of all but accelerator 0. What is left is fetched, into room
    that the first device, or memory, keeps for it: an eighth of what can be, or twice the largest.

    Raises InvalidArgument for another name, without limits, or for devices that are not here."""
    name, ram = given.device_map, given_bytes(given.ram, "ram")
    limits = _limits(given)
    if name not in MAPS:
        raise InvalidArgument(
            f"stowage.offload: device_map must be a mapping or of {', '.join(MAPS)}, got {name!r}"
        )
    if ram is None and (name == "auto" or not limits):
        raise InvalidArgument(
            f"stowage.offload: ram must come with device_map={name!r}, the bytes to fill, got none"
        )
    if name == "auto":
        rooms = {str(device): size for device, size in limits.items()}
        made = plan(
            inventory.model, ram=ram or 0, accelerator=rooms or None, folder=given.folder or "."
        )
        return Mapped(made, given.folder, None, None, None, None)
    if not limits:
        return _in_memory(inventory, given.folder, ram or 0)
    return _on_devices(inventory, given, limits)


def _limits(given: Given) -> dict[torch.device, int]:
    """Bytes of each accelerator, first of the one that weights are fetched to."""
    sizes: Mapping[str, Size] = {}
    if isinstance(given.accelerator, Mapping):
        sizes = given.accelerator
    elif given.accelerator is not None:
        here = given.device or torch.accelerator.current_accelerator() or CPU
        sizes = {str(here): given.accelerator}
    named = [*sizes] if given.device is None else [given.device, *sizes]
    raise_problems("stowage.offload", [p for d in named for p in device_problems(d)])
    found = {device_of_name(d): byte_count(n, f"accelerator {d}") for d, n in sizes.items()}
    home = next((device_of_name(d) for d in named), None)
    if home == CPU and found:
        raise InvalidArgument(
            f"stowage.offload: accelerator must come with a device, got {given.accelerator!r} for "
            "the CPU"
        )
    if home not in (None, CPU, *found):
        raise InvalidArgument(
            f"stowage.offload: accelerator must have bytes for {home}, got {given.accelerator!r}"
        )
    return {d: found[d] for d in (home, *found) if d is not None and d != CPU}


def _on_devices(inventory: Inventory, given: Given, limits: dict[torch.device, int]) -> Mapped:
    model, every, home = inventory.model, inventory.every, next(iter(limits))
    room = dict(limits)
    if sum(nbytes(held.tensor) for held in every) > sum(room.values()):
        room[home] = max(room[home] - _ring(every), 0)
    names: dict[Device, torch.device] = {device.index: device for device in limits}
    numbered: dict[Device, int] = {number: room[names[number]] for number in sorted(names)}
    if given.device_map != "sequential":
        numbered = balanced(model, numbered, low_zero=given.device_map == "balanced_low_0")
    found = first_fit(model, numbered | {"cpu": _ALL})
    here = {at: d for at, d in found.items() if d in names and at in inventory.modules}
    places = {at: names[d] for at, d in here.items()}
    return Mapped(None, given.folder, given.ram, home, limits[home], dict(places))


def _in_memory(inventory: Inventory, folder: Folder | None, ram: int) -> Mapped:
    """The first modules stay as they are; an engine with what is left of `ram` fetches the rest."""
    every = inventory.every
    if sum(nbytes(held.tensor) for held in every) <= ram:
        return Mapped(None, folder, ram, None, None, None)
    found = first_fit(inventory.model, {"cpu": max(ram - _ring(every), 0), "disk": _ALL})
    known = {name for held in every for name in held.names if not held.is_buffer}
    known |= inventory.modules.keys()
    places: dict[str, str | torch.device] = {
        name: RAM for name, place in found.items() if place == "cpu" and name in known
    }
    stay = Places(inventory, places)
    kept = sum(nbytes(held.tensor) for held in every if stay.stays(held) and can_be_fetched(held))
    return Mapped(None, folder, ram - kept, None, None, places)


def _ring(every: list[Held]) -> int:
    return disk_budget([nbytes(held.tensor) for held in every if can_be_fetched(held)])

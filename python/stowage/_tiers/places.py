# SPDX-License-Identifier: Apache-2.0
"""What the caller of `offload` says of where weights are: the device, and a map of modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from stowage._model.weights import Held, Inventory, can_be_fetched

CPU = torch.device("cpu")
RAM, DISK = "ram", "disk"
DeviceMap = Mapping[str, "str | int | torch.device"]


def devices_here() -> list[torch.device]:
    """The devices that weights can be fetched to, the CPU first."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return [CPU]
    count = torch.accelerator.device_count()
    return [CPU, *(torch.device(accelerator.type, i) for i in range(count))]


def device_of_name(name: str | int | torch.device) -> torch.device | None:
    """The device here that is called so, with its number; None where there is none."""
    here = devices_here()
    if isinstance(name, int):
        name = f"{here[-1].type}:{name}"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        return None
    if device.type == "cpu":
        return CPU
    if device.index is None and device.type == here[-1].type:
        device = torch.device(device.type, torch.accelerator.current_device_index())
    return device if device in here else None


def device_problems(device: str | int | torch.device) -> list[str]:
    """Why weights cannot be fetched to `device`."""
    if device_of_name(device) is not None:
        return []
    here = ", ".join(map(str, devices_here()))
    return [f"device must be one that is here, got {str(device)!r} (here: {here})"]


class Places:
    """Where a device map puts each weight, and where each module computes. What the map does not
    name goes to the disk where there is a folder, else it stays in memory, and computes at home."""

    def __init__(
        self,
        inventory: Inventory,
        given: DeviceMap | None,
        home: torch.device = CPU,
        has_folder: bool = True,
    ) -> None:
        self.home, self._has_folder = home, has_folder
        self._given: dict[str, str | torch.device] = {}
        self.problems = self._check(inventory, given or {})

    def _check(self, inventory: Inventory, given: DeviceMap) -> list[str]:
        modules = inventory.modules.keys()
        known = modules | {name for held in inventory.parameters for name in held.names}
        problems = []
        for name, place in given.items():
            if name not in known:
                problems.append(f"device_map: names must be of modules or parameters, got {name!r}")
            problems += self._put(name, place)
            around = [other for other in given if other != name and _contains(other, name)]
            problems += [f"device_map: {other!r} contains {name!r}, give one" for other in around]
            if name not in modules and isinstance(self._given.get(name), torch.device):
                problems.append(
                    f"device_map: devices must be of modules, got {place!r} for {name!r}"
                )
        return problems

    def _put(self, name: str, place: str | int | torch.device) -> list[str]:
        if place in (RAM, DISK):
            self._given[name] = str(place)
        elif (device := device_of_name(place)) is not None:
            self._given[name] = RAM if device == CPU else device
        else:
            here = ", ".join(map(str, devices_here()))
            return [f"device_map: {name!r} must be in ram or disk, got {place!r} (here: {here})"]
        if self._given[name] == DISK and not self._has_folder:
            return [f"device_map: {name!r} must come with folder, got 'disk' without one"]
        return []

    def split_ties(self, every: Iterable[Held]) -> list[str]:
        """Tied weights that the map would have in two places, or use on two devices where they
        cannot be fetched."""
        problems = []
        for held in every:
            places = self._of(held)
            resident = any(isinstance(place, torch.device) for place in places)
            apart = resident and len({self.work(name) for name in held.names}) > 1
            if len(places) > 1 or apart:
                names = " and ".join(held.names)
                problems.append(f"device_map: {names} are one tensor, it has two places for it")
        return problems

    def stays(self, held: Held) -> bool:
        """Whether a weight does not go to the disk: the map has another place for a name of it."""
        return any(place != DISK for place in self._of(held))

    def fetches(self, held: Held) -> bool:
        """Whether a weight rests where it is, and is fetched to `home` when it is used."""
        return can_be_fetched(held) and not self.stays(held)

    def work(self, name: str) -> torch.device:
        """The device on which a module or parameter of this name computes."""
        for at, place in self._given.items():
            if _contains(at, name):
                if isinstance(place, torch.device):
                    return place
                return CPU if place == RAM else self.home
        return self.home

    def mapped(self) -> list[str]:
        """The names that the map gives a device other than `home`."""
        return [name for name in self._given if self.work(name) != self.home]

    def all_devices(self) -> set[torch.device]:
        """Every accelerator on which something computes."""
        every = {self.home, *(p for p in self._given.values() if isinstance(p, torch.device))}
        return every - {CPU}

    def _of(self, held: Held) -> set[str | torch.device]:
        names = held.names
        return {place for at, place in self._given.items() if any(_contains(at, n) for n in names)}


def _contains(module: str, name: str) -> bool:
    return module in ("", name) or name.startswith(module + ".")

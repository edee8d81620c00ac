# SPDX-License-Identifier: Apache-2.0
"""What the caller of `offload` says of where weights are: the device, and a map of modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from stowage._model.weights import Held

PLACES = ("ram", "disk")
DeviceMap = Mapping[str, str]


def device_problems(device: str | torch.device) -> list[str]:
    """Why weights cannot be brought to `device`: it must be the CPU."""
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError):
        kind = ""
    if kind == "cpu":
        return []
    here = ["cpu"]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        here += [f"{accelerator.type}:{i}" for i in range(torch.accelerator.device_count())]
    told = f"device must be cpu, got {str(device)!r} (here: {', '.join(here)})"
    if accelerator is not None and kind == accelerator.type:
        told += "; weights come to the CPU only so far"
    return [told]


class Places:
    """Where a device map puts each weight. Without one every weight that can goes to the disk."""

    def __init__(self, model: nn.Module, given: DeviceMap | None) -> None:
        self._given = dict(given or {})
        self.problems = self._check(model)

    def _check(self, model: nn.Module) -> list[str]:
        modules = {path for path, _ in model.named_modules(remove_duplicate=False)}
        known = modules | {name for name, _ in model.named_parameters(remove_duplicate=False)}
        problems = []
        for name, place in self._given.items():
            if name not in known:
                problems.append(f"device_map: names must be of modules or parameters, got {name!r}")
            if place not in PLACES:
                problems.append(
                    f"device_map: {name!r} must be in {' or '.join(PLACES)}, got {place!r}"
                )
            around = [other for other in self._given if other != name and _contains(other, name)]
            problems += [f"device_map: {other!r} contains {name!r}, give one" for other in around]
        return problems

    def split_ties(self, every: Iterable[Held]) -> list[str]:
        """Tied weights that the map would have in two places."""
        return [
            f"device_map: {' and '.join(held.names)} are one tensor, it has two places for it"
            for held in every
            if len(self._of(held)) > 1
        ]

    def stays(self, held: Held) -> bool:
        """Whether a weight stays in memory: any name that it has is mapped to "ram"."""
        return "ram" in self._of(held)

    def _of(self, held: Held) -> set[str]:
        names = held.names
        return {place for at, place in self._given.items() if any(_contains(at, n) for n in names)}


def _contains(module: str, name: str) -> bool:
    return module in ("", name) or name.startswith(module + ".")

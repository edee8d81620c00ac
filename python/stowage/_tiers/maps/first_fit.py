# SPDX-License-Identifier: Apache-2.0
"""`first_fit`: a device map that fills one device after the other in the order of definition, as
accelerate does, valid for direct buffers and ties of any shape."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from stowage._ops import _torch
from stowage._tiers.maps.budgets import Device, Limits, max_memory, names
from stowage._tiers.maps.module_sizes import (
    Dtype,
    Unit,
    children,
    largest_layers,
    module_sizes,
    size_with_ties,
    tied_names,
    tied_outside,
)

_LOG = logging.getLogger("stowage")


def first_fit(
    model: nn.Module,
    limits: Limits | None = None,
    no_split: Iterable[str] | str | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    *,
    verbose: bool = False,
    offload_buffers: bool = False,
    fallback: bool = False,
) -> dict[str, Device]:
    """A device for each part of `model`: accelerators, then "cpu", then "disk".

    Each part goes to the current device if it fits there with all that is tied to it; else it is
    split into its parameters, children and persistent buffers, unless its class is in `no_split`;
    else the next device is the current one. The first accelerator and the CPU keep room for the
    largest layer that is still to come. `fallback` looks for a later part that fits before a device
    is left empty. Warns where buffers of offloaded parts fit no accelerator.
    """
    filling = _Filling(model, max_memory(limits), names(no_split), dtype, special_dtypes, verbose)
    filling.run(fallback)
    if not offload_buffers:
        filling.warn_of_buffers(dtype, special_dtypes)
    filling.tell_of_empty_devices()
    return filling.placed


class _Filling:
    """What is placed, what is left, and how full each device is."""

    def __init__(
        self,
        model: nn.Module,
        limits: dict[Device, int],
        whole: list[str],
        dtype: Dtype | None,
        special_dtypes: Mapping[str, Dtype] | None,
        verbose: bool,
    ) -> None:
        self.model, self.limits, self.whole, self.verbose = model, limits, whole, verbose
        self.devices: list[Device] = [d for d in limits if d != "disk"] + ["disk"]
        self.accelerators = [d for d in self.devices if d not in ("cpu", "disk")]
        first = self.accelerators[:1]
        self.reserving = ["mps"] if "mps" in first else [*first, "cpu"]
        self.sizes = module_sizes(model, dtype=dtype, special_dtypes=special_dtypes)
        self.ties = tied_names(model)
        self.used: dict[Device, int] = dict.fromkeys(self.devices, 0)
        self.placed: dict[str, Device] = {}
        self.parts: dict[Device, list[nn.Module]] = {}  # placed modules
        self.least: dict[Device, int] = {}  # what a device that stayed empty would have needed
        self.left: list[Unit] = [
            *model.named_parameters(recurse=False),
            *model.named_children(),
            *model.named_buffers(recurse=False),
        ]
        self.largest, self.largest_names = largest_layers(self.left, self.sizes, whole)

    def run(self, fallback: bool) -> None:
        current = 0
        while self.left:
            unit = self.left.pop(0)
            self._forget_layer(unit[0])
            device = self.devices[current]
            with_ties, tied = self._tied(unit, self.left)
            reserve = self.largest if device in self.reserving else 0
            room = None if device == "disk" else self.limits[device] - reserve - self.used[device]
            if room is None or with_ties <= room:
                self._place(unit, tied, device, with_ties)
                continue
            size = self.sizes[unit[0]]
            if tied and size <= room and self._split_tied(unit, tied):
                continue
            if size >= room and children(unit[1], self.whole):
                self._say(f"split {unit[0]}: {size} bytes, {room} free on {device}")
                self.left = parts_of(unit, self.model) + self.left
                self._measure()
                continue
            if self.used[device] == 0:
                if fallback and self._fall_back(unit, max(self.largest, with_ties), device):
                    continue
                self.least[device] = with_ties + reserve
            self._say(f"{device} is full at {unit[0]}")
            self.used[device] += reserve
            current += 1
            self.left.insert(0, unit)

    def _say(self, text: str) -> None:
        if self.verbose:
            print(text)

    def _forget_layer(self, name: str) -> None:
        """The reserve is for layers that are still to come."""
        self.largest_names = [
            n for n in self.largest_names if n != name and not n.startswith(name + ".")
        ]
        if not self.largest_names:
            self._measure()

    def _measure(self) -> None:
        modules = [(n, part) for n, part in self.left if isinstance(part, nn.Module)]
        self.largest, self.largest_names = largest_layers(modules, self.sizes, self.whole)

    def _tied(self, unit: Unit, others: Sequence[Unit]) -> tuple[int, list[Unit]]:
        """Bytes of a part and of all of `others` that share a tensor with it, or with one of those,
        and these others."""
        tied = tied_outside(unit, others, self.ties)
        return size_with_ties(unit, tied, self.sizes), tied

    def _place(self, unit: Unit, tied: list[Unit], device: Device, size: int) -> None:
        self._say(f"put {', '.join(n for n, _ in [unit, *tied])} on {device}: {size} bytes")
        self.used[device] += size
        gone = {name for name, _ in tied}
        self.left = [other for other in self.left if other[0] not in gone]
        for name, part in [unit, *tied]:
            self.placed[name] = device
            if isinstance(part, nn.Module):
                self.parts.setdefault(device, []).append(part)

    def _split_tied(self, unit: Unit, tied: list[Unit]) -> bool:
        """Splits the first part tied to `unit` that can be: less may come along with it."""
        for other in tied:
            if children(other[1], self.whole):
                at = [name for name, _ in self.left].index(other[0])
                parts = parts_of(other, self.model)
                self.left = [unit, *self.left[:at], *parts, *self.left[at + 1 :]]
                self._measure()
                return True
        return False

    def _fall_back(self, unit: Unit, reserve: int, device: Device) -> bool:
        """Puts the first part that fits, the biggest way to have it, in front of `unit`."""
        found = self._search(unit, self.limits[device] - reserve)
        if found is None:
            return False
        self._say(f"{unit[0]} does not fit on {device}, {found[0]} does")
        while found[0] not in [name for name, _ in self.left]:
            around = next(u for u in self.left if found[0].startswith(u[0] + "."))
            at = self.left.index(around)
            self.left[at : at + 1] = parts_of(around, self.model)
        rest = [other for other in self.left if other[0] != found[0]]
        self.left = [found, unit, *rest]
        return True

    def _search(self, stuck: Unit, limit: int) -> Unit | None:
        """The first part after `stuck` that takes at most `limit` bytes with what is tied to it."""
        search, passed = list(self.left), [stuck]
        while search and limit >= 0:
            unit = search.pop(0)
            if self._tied(unit, passed + search)[0] <= limit:
                return unit
            if children(unit[1], self.whole):
                search = parts_of(unit, self.model) + search
            else:
                passed.append(unit)
        return None

    def warn_of_buffers(
        self, dtype: Dtype | None, special_dtypes: Mapping[str, Dtype] | None
    ) -> None:
        """Buffers of offloaded modules stay on an accelerator: is there room?"""
        modules = [m for device in ("cpu", "disk") for m in self.parts.get(device, [])]
        size = sum(
            module_sizes(m, dtype, special_dtypes, buffers_only=True).get("", 0) for m in modules
        )
        room = [self.limits[d] - self.used[d] for d in self.accelerators]
        if size and room and max(room) < size:
            warnings.warn(
                f"stowage: buffers of offloaded modules take {size} bytes, and no accelerator has "
                "room for them; consider offload_buffers=True",
                stacklevel=4,
            )

    def tell_of_empty_devices(self) -> None:
        if self.least:
            needed = "".join(f"\n  - {d}: {size} bytes required" for d, size in self.least.items())
            _LOG.info("no modules could be assigned to devices of insufficient memory:%s", needed)


def parts_of(unit: Unit, model: nn.Module) -> list[Unit]:
    """A module's own parameters, its children, and its own persistent buffers."""
    name, module = unit
    assert isinstance(module, nn.Module)
    kept = [
        (own, tensor)
        for own, tensor in module.named_buffers(recurse=False)
        if own not in _torch.non_persistent(module)
    ]
    every: list[tuple[str, nn.Module | torch.Tensor]] = [
        *module.named_parameters(recurse=False),
        *module.named_children(),
        *kept,
    ]
    return [(f"{name}.{own}", part) for own, part in every]

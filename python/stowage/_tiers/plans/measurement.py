# SPDX-License-Identifier: Apache-2.0
"""`measured`: what passes of a model took, in the form that a plan is compared with."""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stowage._model.sizes import Seen, memory, new_bytes
from stowage._model.weights import Inventory
from stowage._ops.errors import InvalidArgument
from stowage._ops.memory import is_borrowed
from stowage._ops.texts import write_text
from stowage._tiers.counts import DeviceReport, EngineReport
from stowage._tiers.device.placement import devices_of
from stowage._tiers.disk.engine import engine_of

_EVERY = 0.005  # seconds between two looks at the process's memory


@dataclass
class Measured:
    """What passes took, as `stowage.measured` gives it; complete when its block ends.

    Example:
        >>> stowage.Measured(passes=[0.5, 0.25, 1.0]).seconds  # the median
        0.5
    """

    passes: list[float] = field(default_factory=list)  #: seconds of each
    peak: dict[str, int] = field(default_factory=dict)  #: bytes of weights at most, by tier
    bytes: dict[str, int] = field(default_factory=dict)  #: in a pass, by link: "disk->ram"
    stall: float = 0.0  #: seconds in a pass that the work waited for weights
    process: int = 0  #: bytes by which RssAnon + RssFile of the process grew at most

    @property
    def seconds(self) -> float:
        """Seconds of a pass: the median; 0 where there was none."""
        return statistics.median(self.passes) if self.passes else 0.0

    def figures(self) -> dict[str, Any]:
        """All of it, as `Plan.html`, `Plan.compare` and `stowage report --measured` take it.

        Returns:
            Names to figures.
        """
        return {
            "seconds": self.seconds,
            "peak": self.peak,
            "bytes": self.bytes,
            "stall": self.stall,
            "passes": self.passes,
            "process": self.process,
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the figures as JSON.

        Args:
            path: the file.

        Raises:
            FileError: it cannot be written.
        """
        write_text(path, json.dumps(self.figures(), indent=1))

    def __str__(self) -> str:
        peaks = ", ".join(f"{tier} {size / 2**20:.1f} MiB" for tier, size in self.peak.items())
        links = ", ".join(f"{link} {size / 2**20:.1f} MiB" for link, size in self.bytes.items())
        return (
            f"{len(self.passes)} passes of {self.seconds:.4g} s, {self.stall:.4g} s of it waited; "
            f"peak {peaks}; moved {links or 'nothing'} in a pass; the process grew by "
            f"{self.process / 2**20:.1f} MiB"
        )


def figures_of(given: Measured | Mapping[str, Any]) -> dict[str, Any]:
    return given.figures() if isinstance(given, Measured) else dict(given)


@contextmanager
def measured(model: nn.Module) -> Iterator[Measured]:
    """Counts the forward passes of an offloaded model in the block, and what each took.

    The first pass after `offload` reads more than later ones, and learns the order: run one before.
    A device is waited for at the end of each pass.

    Args:
        model: a module that is offloaded.

    Returns:
        A context manager that gives a `Measured`, complete when the block ends. Its `peak` is what
        engine and devices held at most since `offload` or `load`, and the weights that stay beside;
        tiles and activations are not in it.

    Raises:
        InvalidArgument: the model is not offloaded.

    Example:
        >>> stowage.offload(model, ram="64KiB", folder="weights")
        >>> with stowage.measured(model) as took:
        ...     y = model(x)
        >>> len(took.passes)
        1
    """
    if engine_of(model) is None and devices_of(model) is None:
        raise InvalidArgument(
            "stowage.measured: the model must be offloaded (stowage.offload, or stowage.load with "
            "ram=), got one that is not"
        )
    result, clock = Measured(), _Passes(model)
    with _Growth() as growth:
        try:
            yield result
        finally:
            clock.remove()
    _fill(result, model, clock)
    result.process = growth.most


def _fill(result: Measured, model: nn.Module, clock: _Passes) -> None:
    count = max(len(clock.seconds), 1)
    result.passes = clock.seconds
    result.peak = _resident(model)
    if clock.engine is not None:
        result.bytes["disk->ram"] = clock.engine.bytes_read // count
        result.stall += clock.engine.stall / count
        result.peak["ram"] = result.peak.get("ram", 0) + clock.engine.peak
    if clock.device is not None:
        name = clock.device.device
        result.bytes[f"ram->{name}"] = clock.device.bytes_copied // count
        result.stall += clock.device.stall / count
        result.peak[name] = result.peak.get(name, 0) + clock.device.peak


class _Passes:
    """Hooks of a model: seconds of each forward pass, and what its tiers did in all of them."""

    def __init__(self, model: nn.Module) -> None:
        self.seconds: list[float] = []
        self.engine: EngineReport | None = None
        self.device: DeviceReport | None = None
        self._model = model
        self._begun: list[tuple[float, EngineReport | None, DeviceReport | None]] = []
        enter = model.register_forward_pre_hook(self._enter, prepend=True)
        leave = model.register_forward_hook(self._leave, always_call=True)
        self._hooks = (enter, leave)

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _enter(self, module: nn.Module, args: object) -> None:
        _finish(module)
        self._begun.append((time.perf_counter(), *_reports(module)))

    def _leave(self, module: nn.Module, args: object, result: object) -> None:
        _finish(module)
        begun, engine, device = self._begun.pop()
        self.seconds.append(time.perf_counter() - begun)
        engine_now, device_now = _reports(module)
        if engine is not None and engine_now is not None:
            once = engine_now.since(engine)
            self.engine = once if self.engine is None else self.engine.then(once)
        if device is not None and device_now is not None:
            self.device = _both(self.device, device_now.since(device))


def _both(before: DeviceReport | None, now: DeviceReport) -> DeviceReport:
    if before is None:
        return now
    copied = before.bytes_copied + now.bytes_copied
    return DeviceReport(
        device=now.device, bytes_copied=copied, stall=before.stall + now.stall, peak=now.peak
    )


def _reports(model: nn.Module) -> tuple[EngineReport | None, DeviceReport | None]:
    engine, devices = engine_of(model), devices_of(model)
    tier = None if devices is None else devices.tier
    return (
        None if engine is None else engine.report(),
        None if tier is None else tier.report(),
    )


def _finish(model: nn.Module) -> None:
    """Waits for the work that the device was given."""
    devices = devices_of(model)
    if devices is not None and devices.tier is not None:
        torch.accelerator.synchronize(devices.tier.device)


def _resident(model: nn.Module) -> dict[str, int]:
    """Bytes of weights and buffers that no engine fetches, by tier."""
    found: dict[str, int] = {}
    seen: Seen = set()
    for held in Inventory(model).written:
        for part in memory(held.tensor):
            if part.is_meta or is_borrowed(part):
                continue
            tier = "ram" if part.device.type == "cpu" else str(part.device)
            found[tier] = found.get(tier, 0) + new_bytes([part], seen)
    return found


class _Growth:
    """By how many bytes the process's own and mapped memory grew at most, seen every 5 ms."""

    def __init__(self) -> None:
        self.most = 0
        self._first = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _Growth:
        self._first = _resident_bytes()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        over = False
        while not over:
            over = self._over.wait(_EVERY)
            self.most = max(self.most, _resident_bytes() - self._first)


def _resident_bytes() -> int:
    total = 0
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(("RssAnon:", "RssFile:")):
            total += int(line.split()[1]) << 10
    return total

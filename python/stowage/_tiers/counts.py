# SPDX-License-Identifier: Apache-2.0
"""What an engine counts, as its users see it: since the beginning, or between two reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import add, sub
from typing import Any, NamedTuple

_SUMS = slice(1, 11)  # of an EngineReport: "acquired" to "bytes_formed"
_LINK_SUMS = ("uses", "hits", "misses", "late", "ahead", "evicted", "bytes_copied")


@dataclass(frozen=True)
class DeviceReport:
    """What the link to a device carried, as `stowage.engine_report(model).device` has it.

    Example:
        >>> earlier = stowage.DeviceReport("cuda:0", uses=10, hits=9, misses=1)
        >>> stowage.DeviceReport("cuda:0", uses=30, hits=29, misses=1).since(earlier).uses
        20
    """

    device: str  #: by torch's name
    uses: int = 0  #: of weights on the device: hits + misses + late
    hits: int = 0  #: were there
    misses: int = 0  #: were copied when they were asked for
    late: int = 0  #: were being copied ahead, and the device waited for the rest
    ahead: int = 0  #: copies that were begun before the weight was used
    evicted: int = 0  #: weights that gave way to others
    bytes_copied: int = 0  #: to the device, in the resting form
    held: int = 0  #: bytes of the ring that weights have now
    peak: int = 0  #: the same at most, since the beginning; never more than `ring`
    ring: int = 0  #: bytes that were allocated on the device, once
    stall: float = 0.0  #: seconds that the host was held up by misses; waits on the device are not

    def since(self, earlier: DeviceReport) -> DeviceReport:
        """What was carried between two reports.

        Args:
            earlier: a report of the same model, taken before.

        Returns:
            The differences of all counts; `held`, `peak` and `ring` are those of now.
        """
        past: dict[str, Any] = {n: getattr(self, n) - getattr(earlier, n) for n in _LINK_SUMS}
        return replace(self, **past, stall=self.stall - earlier.stall)

    def __str__(self) -> str:
        use = max(self.uses, 1)
        return (
            f"{self.device}: {self.uses} uses, {self.hits / use:.0%} there, {self.late / use:.0%} "
            f"late, {self.misses} missed; {self.bytes_copied / 2**20:.1f} MiB copied, "
            f"{self.stall:.3f} s waited; {self.held / 2**20:.1f} MiB held, at most "
            f"{self.peak / 2**20:.1f} of {self.ring / 2**20:.1f}"
        )


class EngineReport(NamedTuple):  # made faster than a frozen dataclass: one for each pass
    """What an engine did, since it was made or since an earlier report: of `engine_report`.

    Example:
        >>> stowage.EngineReport(bytes_read=1 << 30, seconds=0.5).rate  # bytes per second
        2147483648.0
    """

    reads: str = ""  #: how bytes come: mapped, buffered or direct
    acquired: int = 0  #: uses of weights: hits + misses + late + borrowed
    hits: int = 0  #: were in memory
    misses: int = 0  #: were read while the model waited
    late: int = 0  #: were being prefetched, and waited for
    borrowed: int = 0  #: read through the mapping: no room, and the thread used another weight
    ahead: int = 0  #: reads that were begun before the weight was used
    unused: int = 0  #: of these: what went again, or failed, before it was used
    evicted: int = 0  #: weights that gave way to others
    bytes_read: int = 0  #: from the file
    bytes_formed: int = 0  #: of weights in another order or at another offset, put in order
    held: int = 0  #: bytes of the file in memory now
    peak: int = 0  #: the same at most, since the beginning; never more than the budget
    stall: float = 0.0  #: seconds that the model waited for weights
    forming: float = 0.0  #: seconds that putting in order took, of all threads together
    written: int = 0  #: bytes of weights that were written to: in memory for good, in the budget
    journal: int = 0  #: bytes of weights that were written to and did not fit the budget
    seconds: float = 0.0  #: that the report is about
    probe: float = 0.0  #: bytes a second that the disk gives, as the model's plan has it
    device: DeviceReport | None = None  #: the link to an accelerator, where there is one

    @property
    def rate(self) -> float:
        """Bytes that came from the file in a second of the report."""
        return self.bytes_read / self.seconds if self.seconds else 0.0

    def since(self, earlier: EngineReport) -> EngineReport:
        """What was done between two reports of a model: of a pass, where they were taken around it.

        Args:
            earlier: a report of the same model, taken before.

        Returns:
            The differences of all counts; `held`, `peak`, `written` and `journal` are those of now.
        """
        device = self.device
        if device is not None and earlier.device is not None:
            device = device.since(earlier.device)
        sums = map(sub, self._sums(), earlier._sums())
        stall, seconds = self.stall - earlier.stall, self.seconds - earlier.seconds
        forming = self.forming - earlier.forming
        kept = (forming, self.written, self.journal, seconds, self.probe, device)
        return EngineReport._make((self.reads, *sums, self.held, self.peak, stall, *kept))

    def then(self, later: EngineReport) -> EngineReport:
        """Both together.

        Args:
            later: counted from zero, in another engine of the same model.

        Returns:
            The sums of all counts; what is said of now is that of `later`.
        """
        sums = map(add, self._sums(), later._sums())
        waited = (self.stall + later.stall, self.forming + later.forming)
        more = (max(self.peak, later.peak), *waited, *later[-5:])
        return EngineReport._make((later.reads, *sums, later.held, *more))

    def _sums(self) -> Any:  # tuple[int, ...]
        return self[_SUMS]

    def __str__(self) -> str:
        use = max(self.acquired, 1)
        beside = f" of {self.probe / 1e9:.2f}" if self.probe else ""
        text = (
            f"{self.reads} reads: {self.acquired} uses, {self.hits / use:.0%} in memory, "
            f"{self.late / use:.0%} late, {self.misses} missed, {self.unused} read in vain; "
            f"{self.bytes_read / 2**20:.1f} MiB read in {self.seconds:.3f} s "
            f"({self.rate / 1e9:.2f} GB/s{beside}), {self.stall:.3f} s of it waited; "
            f"{self.held / 2**20:.1f} MiB held, at most {self.peak / 2**20:.1f}"
        )
        if self.bytes_formed:
            text += f"; {self.bytes_formed / 2**20:.1f} MiB put in order in {self.forming:.3f} s"
        if self.written:
            text += f"; {self.written / 2**20:.1f} MiB were written to and stay in memory"
        if self.journal:
            text += f"; {self.journal / 2**20:.1f} MiB were written to and rest in a journal"
        return text if self.device is None else f"{text}\n{self.device}"


class WeightUses(NamedTuple):
    """What became of the uses of one weight, a stack of experts with all that it has: of
    `stowage.uses`.

    Example:
        >>> stowage.WeightUses(hits=9, misses=1).acquired
        10
    """

    hits: int = 0  #: were in memory
    misses: int = 0  #: were read while the model waited
    late: int = 0  #: were being prefetched, and waited for
    borrowed: int = 0  #: read through the mapping
    ahead: int = 0  #: reads that were begun before the use
    unused: int = 0  #: of these: what went again, or failed, before it was used
    stall: float = 0.0  #: seconds that the model waited
    by_index: tuple[int, ...] = ()  #: uses of each matrix of a stack that come by themselves

    @property
    def acquired(self) -> int:
        """All uses: hits + misses + late + borrowed."""
        return self.hits + self.misses + self.late + self.borrowed

    def _plus(self, other: WeightUses, sign: int = 1) -> WeightUses:
        """Both together, or one without the other, index by index."""
        counts = [a + sign * b for a, b in zip(self[:7], other[:7], strict=True)]
        longer = max(len(self.by_index), len(other.by_index))
        mine, its = (list(u.by_index) + [0] * (longer - len(u.by_index)) for u in (self, other))
        by_index = tuple(a + sign * b for a, b in zip(mine, its, strict=True))
        return WeightUses._make((*counts, by_index))


def added(some: Mapping[str, WeightUses], more: Mapping[str, WeightUses]) -> dict[str, WeightUses]:
    """The uses of each weight in both."""
    every = dict.fromkeys((*some, *more))
    nothing = WeightUses()
    return {name: some.get(name, nothing)._plus(more.get(name, nothing)) for name in every}

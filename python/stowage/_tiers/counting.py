# SPDX-License-Identifier: Apache-2.0
"""What an engine counts, as its users see it: since the beginning, or between two reports."""

from __future__ import annotations

from dataclasses import dataclass, replace

_SUMS = ("acquired", "hits", "misses", "late", "borrowed", "ahead", "evicted", "bytes_read")


@dataclass(frozen=True)
class EngineReport:
    """What an engine did since it was made, or since an earlier report; see
    `stowage.engine_report`."""

    reads: str = ""  #: how bytes come: mapped, buffered or direct
    acquired: int = 0  #: uses of weights: hits + misses + late + borrowed
    hits: int = 0  #: were in memory
    misses: int = 0  #: were read while the model waited
    late: int = 0  #: were being read ahead, and waited for
    borrowed: int = 0  #: read through the mapping: no room, and the thread used another weight
    ahead: int = 0  #: reads that were begun before the weight was used
    evicted: int = 0
    bytes_read: int = 0
    held: int = 0  #: bytes of the file in memory now
    peak: int = 0  #: the same at most, since the beginning; never more than the budget
    stall: float = 0.0  #: seconds that the model waited for weights
    written: int = 0  #: bytes of weights that were written to: in memory for good, in the budget
    seconds: float = 0.0  #: that the report is about

    @property
    def rate(self) -> float:
        """Bytes that came from the file in a second of the report."""
        return self.bytes_read / self.seconds if self.seconds else 0.0

    def since(self, earlier: EngineReport) -> EngineReport:
        """What was done between two reports of a model: of a pass, where they were taken before and
        after it. `held`, `peak` and `written` are those of now."""
        past = {name: getattr(self, name) - getattr(earlier, name) for name in _SUMS}
        stall, seconds = self.stall - earlier.stall, self.seconds - earlier.seconds
        return replace(self, **past, stall=stall, seconds=seconds)

    def then(self, later: EngineReport, written: int, seconds: float) -> EngineReport:
        """Both together: `later` counted from zero, in another engine of the same model."""
        total = {name: getattr(self, name) + getattr(later, name) for name in _SUMS}
        peak, stall = max(self.peak, later.peak), self.stall + later.stall
        facts = {"peak": peak, "stall": stall, "written": written, "seconds": seconds}
        return replace(later, **total, **facts)  # type: ignore[arg-type]

    def __str__(self) -> str:
        use = max(self.acquired, 1)
        text = (
            f"{self.reads} reads: {self.acquired} uses, {self.hits / use:.0%} in memory, "
            f"{self.late / use:.0%} late, {self.misses} missed; {self.bytes_read / 2**20:.1f} MiB "
            f"read in {self.seconds:.3f} s ({self.rate / 1e9:.2f} GB/s), {self.stall:.3f} s of it "
            f"waited; {self.held / 2**20:.1f} MiB held, at most {self.peak / 2**20:.1f}"
        )
        if self.written:
            text += f"; {self.written / 2**20:.1f} MiB were written to and stay in memory"
        return text

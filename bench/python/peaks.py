# SPDX-License-Identifier: Apache-2.0
"""Counts the peak of memory of a call on the CPU: torch's allocator, event by event, and our pool.

Scratch of the pool lives only inside products, so a product's peak is what the allocator had
then plus the pool's. Nothing is sampled, and pages or caches of the system have no part in it.
"""

import ctypes
import importlib.util
import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch's profiler prints lines of its own
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch.autograd.profiler import profile

PRODUCTS = frozenset({
    "aten::linear", "aten::mm", "aten::addmm", "aten::convolution", "aten::convolution_backward",
    "stowage::linear", "stowage::linear_grad_input",
})  # fmt: skip


@dataclass(frozen=True)
class Peak:
    """Bytes beyond what there was before the call."""

    anywhere: int  # the most that torch's allocator had given
    products: int  # the same while a weight was at work
    scratch: int  # the most of our pool, all inside products
    held: int  # what was still allocated at the end

    @property
    def total(self) -> int:
        return max(self.anywhere, self.products + self.scratch)


class _Use(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("live", "idle", "peak")]


def _scratch_use() -> Callable[[bool], _Use]:
    """stowage::scratch_use of the library that the ops run on."""
    spec = importlib.util.find_spec("stowage.stowage_torch")
    assert spec is not None and spec.origin is not None
    found = Path(os.path.realpath(spec.origin)).parent / "lib/libstowage.so"
    use = ctypes.CDLL(str(found))._ZN7stowage2v011scratch_useEb
    use.restype, use.argtypes = _Use, [ctypes.c_bool]
    return use  # type: ignore[no-any-return]


def peak_of(run: Callable[[], object]) -> Peak:
    """Runs it, on a warm process."""
    use = _scratch_use()
    use(True)
    with profile(profile_memory=True) as seen:
        kept = run()
    scratch = use(True).peak
    events = sorted(seen.kineto_results.events(), key=lambda event: event.start_ns())
    times, totals = [0], [0]
    for event in events:
        if event.name() == "[memory]":
            times.append(event.start_ns())
            totals.append(totals[-1] + event.nbytes())
    at_work = 0
    for event in events:
        if event.name() in PRODUCTS:
            first = bisect_right(times, event.start_ns()) - 1
            last = bisect_right(times, event.start_ns() + event.duration_ns())
            at_work = max(at_work, *totals[first:last])
    del kept
    return Peak(max(totals), at_work, scratch, totals[-1])


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(field)]
    return int(line.split()[1]) * 1024


def resident_peak_of(run: Callable[[], object]) -> int:
    """How far resident memory rises above what was there. Memory that allocators have kept from
    before does not show: for the first run of a process."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def peak_beside_collectives(run: Callable[[], object]) -> int:
    """The most that torch's allocator had given beyond what there was before, without what a
    backend of torch.distributed takes inside its calls, part of which other threads free."""
    with profile(profile_memory=True) as seen:
        run()
    events: list[tuple[int, int, int, bool]] = []
    results = seen.kineto_results
    stack = [(root, False) for root in results.experimental_event_tree()]  # type: ignore[union-attr]
    while stack:
        event, within = stack.pop()
        within = within or event.name.startswith(("c10d::", "gloo:"))
        if event.name == "[memory]":
            facts = event.extra_fields
            events.append((event.start_time_ns, facts.ptr, facts.alloc_size, within))
        stack += [(child, within) for child in event.children]
    total, most, theirs = 0, 0, set()
    for _, address, size, within in sorted(events, key=lambda event: event[0]):
        if size > 0 and within:
            theirs.add(address)
        elif size < 0 and address in theirs:
            theirs.remove(address)
        else:
            theirs.discard(address)
            total += size
            most = max(most, total)
    return most

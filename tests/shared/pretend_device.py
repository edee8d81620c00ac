# SPDX-License-Identifier: Apache-2.0
"""A device of torch, "pretend:0" to "pretend:2", whose memory is the host's, for tests.

It is compiled once per checkout. It counts what is allocated and what crosses the link, fills new
and freed memory with NaN, runs copies of side streams as late as it may, and notes where two
streams meet in memory without an event between them (`races`). Told what copies and works take
(`speeds`), it says when each would end (`times`), whatever the machine does.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import subprocess
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "tests" / "pretend"


class Times(NamedTuple):
    """Nanoseconds of the pretended clock: how far the host is, and how long links and cores have
    worked."""

    host: float
    copied: float
    computed: float

    def since(self, before: Times) -> Times:
        return Times(*(now - then for now, then in zip(self, before, strict=True)))


class Counters(NamedTuple):
    """Bytes of a device."""

    held: int
    peak: int
    copied_in: int  # from the CPU
    copied_out: int  # to the CPU
    across: int  # from other devices


def load() -> None:
    """Makes torch know the device; the second time nothing."""
    if hasattr(torch, "pretend"):
        return
    torch.ops.load_library(_built())
    torch.utils.rename_privateuse1_backend("pretend")
    module = types.ModuleType("torch.pretend")
    facts = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 3,
        "device": lambda device: torch.accelerator.device_index(torch.device(device).index or 0),
        "current_device": lambda: torch.accelerator.current_device_index(),
        "_is_in_bad_fork": lambda: False,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    module.__dict__.update(facts)
    torch._register_device_module("pretend", module)
    torch.utils.generate_methods_for_privateuse1_backend()
    torch.ops.pretend.start()


def _built() -> Path:
    """The library, made where it is missing or its sources or torch have changed."""
    files = sorted(file for file in SOURCES.iterdir() if file.suffix in (".h", ".cpp"))
    seed = b"".join(file.read_bytes() for file in files) + torch.__version__.encode()
    folder = ROOT / "build" / "pretend"
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"pretend-{hashlib.sha256(seed).hexdigest()[:16]}.so"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            _build([file for file in files if file.suffix == ".cpp"], made)
    return made


def _build(sources: list[Path], made: Path) -> None:
    home = Path(torch.__file__).parent
    includes = [f"-isystem{home / 'include'}"]
    libraries = [f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu"]
    part = made.with_suffix(".part")
    command = ["c++", "-std=c++20", "-O1", "-fPIC", "-shared", *includes, *sources, "-o", part]
    done = subprocess.run([*command, *libraries], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    part.rename(made)


def counters(device: int = 0) -> Counters:
    return Counters(*torch.ops.pretend.counters(device))


def pinned() -> tuple[int, int]:
    """Bytes of the host's memory that are pinned, now and at most since a test's block began."""
    held, peak = torch.ops.pretend.pinned()
    return held, peak


def times() -> Times:
    return Times(*torch.ops.pretend.times())


@contextmanager
def speeds(
    copy: float = 0,
    byte_copied: float = 0,
    work: float = 0,
    byte_of_work: float = 0,
    engines: int = 2,
) -> Iterator[None]:
    """What copies over the link and works of the device take in the block, in nanoseconds, and for
    each byte; `engines`: one copies in both directions, or one in each."""
    torch.ops.pretend.set_speeds([copy, byte_copied, work, byte_of_work], engines)
    try:
        yield
    finally:
        torch.ops.pretend.set_speeds([0.0, 0.0, 0.0, 0.0], 2)


@contextmanager
def few_types() -> Iterator[None]:
    """The devices have neither fp64 nor float8 nor complex numbers in the block, as MPS."""
    torch.ops.pretend.set_lacks(True)
    try:
        yield
    finally:
        torch.ops.pretend.set_lacks(False)


def races() -> str:
    return str(torch.ops.pretend.races())


@contextmanager
def counted(lazy: bool = True, streams: bool = True) -> Iterator[None]:
    """A test's block: counts begin anew, and at its end nothing may have raced. `lazy`: copies of
    side streams run when something waits for them; `streams`: there are any."""
    gc.collect()
    torch.ops.pretend.set_lazy(lazy)
    torch.ops.pretend.set_streams(streams)
    torch.ops.pretend.reset()
    try:
        yield
        assert races() == ""
    finally:
        torch.ops.pretend.set_lazy(True)
        torch.ops.pretend.set_streams(True)

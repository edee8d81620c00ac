# SPDX-License-Identifier: Apache-2.0
"""Processes that may have so much memory, page cache and all: in a control group of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ROOTS = [  # where groups are made, the file of their limit, the file of what they took at most
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.max_usage_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max", "memory.peak"),
]


@contextmanager
def limited(limit: int) -> Iterator[Path]:
    """The folder of a group of its own. Raises OSError where this user, or this container, may
    make none that limits memory."""
    root, of_limit, _ = next(r for r in _ROOTS if r[0].is_dir() or r is _ROOTS[-1])
    group = root / f"stowage-{os.getpid()}"
    group.mkdir()
    try:
        (group / of_limit).write_text(str(limit))
        yield group
    finally:
        group.rmdir()


def peak(group: Path) -> int:
    """Bytes of the group at most, page cache and all."""
    return int(next(p for _, _, n in _ROOTS if (p := group / n).exists()).read_text())


def run(group: Path, script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python script arguments` in that group."""
    enter = f"import os, sys; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))"
    go = "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    return subprocess.run(
        [sys.executable, "-c", f"{enter}; {go}", str(script), *arguments],
        capture_output=True,
        text=True,
    )

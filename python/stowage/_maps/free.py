# SPDX-License-Identifier: Apache-2.0
"""Memory that is free: of the machine, and of the control group (a container) that we are in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from stowage._ops.errors import InvalidArgument

ROOT = Path("/")


def available_ram(root: Path = ROOT) -> int:
    """Bytes that programs can have without swapping: what Linux estimates for the machine
    (MemAvailable), or what the limits of control groups leave, if that is less. `root`: where proc
    and sys are. Raises InvalidArgument where the system does not tell."""
    machine = _field(root / "proc/meminfo", "MemAvailable:")
    if machine is None:
        raise InvalidArgument(
            "stowage: max_memory must be given, this system does not tell what is free"
        )
    return max(0, min([machine * 1024, *_left_of_groups(root)]))


def _left_of_groups(root: Path) -> Iterator[int]:
    """Of our control group (version 2) and those around it. Pages of files that are not in use
    count as free: they go when memory is needed."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, path = line.split(":", 2)
        if number != "0":
            continue
        group, top = root / "sys/fs/cgroup" / path.lstrip("/"), root / "sys/fs/cgroup"
        for folder in (group, *group.parents):
            most, used = _text(folder / "memory.max"), _text(folder / "memory.current")
            if most.strip().isdigit() and used.strip().isdigit():
                idle = _field(folder / "memory.stat", "inactive_file") or 0
                yield int(most) - int(used) + idle
            if folder == top:
                return


def _field(path: Path, name: str) -> int | None:
    for line in _text(path).splitlines():
        words = line.split()
        if words[:1] == [name]:
            return int(words[1])
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

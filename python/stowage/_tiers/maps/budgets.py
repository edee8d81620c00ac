# SPDX-License-Identifier: Apache-2.0
"""Bytes that a device map may use on each device: what the caller allows, shares that spread a
model evenly, or what is free, of the machine and of the control group (a container) that we are in.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from stowage._ops.errors import InvalidArgument
from stowage._tiers.maps.module_sizes import Dtype, leaves, module_sizes

Device = int | str
Limits = Mapping[Device, int]  # bytes
_LOG = logging.getLogger("stowage")
_SHARE = 0.9  # of the only device, where the caller set no limit: the rest is for activations
_SLACK = 1.25  # layers beside its share that each device gets, since they do not divide evenly
_EDGES = 1 << 18  # bytes around the parts of a weight that are read with it, at most
_PART = 8  # of what is on a disk this part may be in memory: enough to prefetch
ROOT = Path("/")


def max_memory(given: Limits | None = None) -> dict[Device, int]:
    """Bytes for each device, accelerators first: of `given`, or the free ones of this machine.
    Raises InvalidArgument for keys that are neither a number nor "mps", "cpu" or "disk"."""
    if given is None:
        return _free()
    limits = dict(given)
    numbers = sorted(device for device in limits if isinstance(device, int))
    for number in numbers:
        if not 0 <= number < _accelerators():
            _LOG.warning("device %s is not available (here: %s)", number, _accelerators())
    order: list[Device] = [*numbers, *(d for d in ("mps", "cpu", "disk") if d in limits)]
    unknown = [device for device in limits if device not in order]
    if unknown:
        raise InvalidArgument(
            f"stowage: max_memory must have numbers, 'mps', 'cpu' or 'disk' as keys, got {unknown}"
        )
    return {device: limits[device] for device in order}


def _accelerators() -> int:
    found = torch.accelerator.current_accelerator(check_available=True)
    return 0 if found is None or found.type == "mps" else torch.accelerator.device_count()


def _free() -> dict[Device, int]:
    free: dict[Device, int] = {}
    for number in range(_accelerators()):
        try:
            free[number] = torch.accelerator.get_memory_info(number)[0]
        except RuntimeError as error:  # one that cannot tell, or is not ours to use
            _LOG.info("device %s does not say what is free: %s", number, error)
    free["mps" if torch.backends.mps.is_available() else "cpu"] = available_ram()
    return free


def balanced(
    model: nn.Module,
    given: Limits | None = None,
    no_split: Iterable[str] | str | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    *,
    low_zero: bool = False,
) -> dict[Device, int]:
    """Limits under which `first_fit` spreads `model` over the accelerators: to each an equal share
    and 1.25 layers more, to the last all that it has. With `low_zero` accelerator 0 gets only what
    the others cannot hold."""
    limits = max_memory(given)
    used = [d for d, size in limits.items() if (isinstance(d, int) or d == "mps") and size > 0]
    if not used:
        return limits
    if len(used) == 1:
        low_zero = False
        if given is None:
            limits[used[0]] = int(limits[used[0]] * _SHARE)
    sizes = module_sizes(model, dtype=dtype, special_dtypes=special_dtypes)
    share = sizes[""] // (len(used) - 1 if low_zero else len(used))
    share += int(_SLACK * max(_largest_whole(model, sizes, names(no_split)), _mean_layer(sizes)))
    numbered = sorted(device for device in used if isinstance(device, int))
    for device in numbered[:-1]:
        if not (low_zero and device == 0):
            limits[device] = min(share, limits[device])
    if low_zero and 0 in limits:
        others = sum(limits[device] for device in numbered if device != 0)
        limits[0] = min(max(0, sizes[""] - others), limits[0])
    return limits


def names(given: Iterable[str] | str | None) -> list[str]:
    """Class names as a list; a string is one name, not its letters."""
    return [given] if isinstance(given, str) else list(given or ())


def _largest_whole(model: nn.Module, sizes: Mapping[str, int], whole: list[str]) -> int:
    """Bytes of the largest class in `whole`; of each class the first module counts."""
    first: dict[str, int] = {}
    for name, module in model.named_modules():
        if name in sizes and name and type(module).__name__ in whole:
            first.setdefault(type(module).__name__, sizes[name])
    return max(first.values(), default=0)


def _mean_layer(sizes: Mapping[str, int]) -> int:
    """Mean bytes of what holds tensors directly and nothing else: leaves of the names without
    those of tensors."""
    tensors = set(leaves(sizes))
    inner = {name: size for name, size in sizes.items() if name not in tensors}
    layers = leaves(inner)
    return int(sum(inner[name] for name in layers) / max(len(layers), 1))


def disk_budget(moved: Collection[int]) -> int:
    """Bytes of memory for weights of sizes `moved`, which rest in a file: an eighth of them, or
    twice the largest."""
    return max(2 * (max(moved, default=0) + _EDGES), sum(moved) // _PART)


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

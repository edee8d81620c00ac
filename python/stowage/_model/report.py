# SPDX-License-Identifier: Apache-2.0
"""`report`: what rests where, in what form, how many bytes it takes and how far it is from the
values it was made from."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from stowage._model.granularity import block_paths, mode_of
from stowage._model.masters import state_of
from stowage._model.sizes import Seen, memory, new_bytes
from stowage._model.stamp import stamp
from stowage._model.stowing import Loss
from stowage._model.table import bytes_text, number_text, table
from stowage._model.weights import Held, buffers, parameters
from stowage.dispatch import fallbacks
from stowage.tensor import StowedTensor

_MEMORIES = "_stowage_memories"  # attribute of a module: its parameter's name -> _Memory


@dataclass(frozen=True)
class _Memory:
    """What `stow` and `load` know of a parameter and cannot be read off it."""

    reason: str
    loss: Loss | None
    stamp: tuple[int, ...] | None  # of the codes that `loss` is about; None for a plain parameter
    earlier: _Memory | None = None  # of other codes, which may come back


@dataclass(frozen=True)
class Row:
    """One weight. Errors are None where the values it was made from were not at hand, or where the
    weight has been written since."""

    name: str
    also: tuple[str, ...]  # further names of a tied weight
    shape: tuple[int, ...]
    storage: str | None  # None: plain
    compute: str
    tier: str  # accelerator, ram, disk; none for a meta tensor
    shard: str  # whole, or which rows are here
    wire: str | None  # what travels between ranks; None where the weight is whole
    logical_bytes: int  # in the compute dtype
    rest_bytes: int  # what this weight adds: bytes that an earlier row holds are not counted again
    reason: str
    working: str = ""  # how much of it is widened at once (docs/working.md); "" of a plain one
    max_error: float | None = None
    rms_error: float | None = None
    relative_error: float | None = None
    saturated: int | None = None
    nonfinite: int | None = None
    worst_block_error: float | None = None  # relative, of values that share a scale
    worst_block: int | None = None  # the place of that scale in its part
    master: str | None = None  # where the exact values are: ram, disk; stale: not of this weight
    master_bytes: int = 0


@dataclass(frozen=True)
class Report:
    """One row for each parameter, and each buffer that rests or was asked to; totals. `str()` is a
    table; `to_json()` has every field."""

    rows: tuple[Row, ...]
    buffer_bytes: int
    fallbacks: Mapping[str, int]  # of this process: operators that dequantized whole weights

    @property
    def stowed(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.storage is not None)

    @property
    def plain(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.storage is None)

    @property
    def rest_bytes(self) -> int:
        """Bytes of all parameters as they are."""
        return sum(row.rest_bytes for row in self.rows)

    @property
    def stowed_bytes(self) -> int:
        """Bytes of the resting weights alone."""
        return sum(row.rest_bytes for row in self.stowed)

    @property
    def master_bytes(self) -> int:
        """Bytes of the exact values kept beside the parameters, in memory and on the disk."""
        return sum(row.master_bytes for row in self.rows)

    @property
    def saturated(self) -> int:
        """Values that did not fit their storage and became its largest one."""
        return sum(row.saturated or 0 for row in self.rows)

    @property
    def logical_bytes(self) -> int:
        """Bytes of all parameters in their compute dtypes, tied ones once."""
        return sum(row.logical_bytes for row in self.rows)

    def __getitem__(self, name: str) -> Row:
        for row in self.rows:
            if name == row.name or name in row.also:
                return row
        raise KeyError(f"stowage.Report: no parameter is named {name!r}")

    def to_json(self) -> str:
        totals = {
            "parameters": len(self.rows),
            "stowed": len(self.stowed),
            "logical_bytes": self.logical_bytes,
            "rest_bytes": self.rest_bytes,
            "stowed_bytes": self.stowed_bytes,
            "master_bytes": self.master_bytes,
            "buffer_bytes": self.buffer_bytes,
            "saturated": self.saturated,
            "fallbacks": dict(self.fallbacks),
        }
        rows = [dataclasses.asdict(row) for row in self.rows]
        return json.dumps({"totals": totals, "rows": rows}, indent=1)

    def __str__(self) -> str:
        body = table(_HEAD, [_cells(row) for row in self.rows])
        share = self.rest_bytes / self.logical_bytes if self.logical_bytes else 1.0
        lines = [
            body,
            f"{len(self.stowed)} of {len(self.rows)} parameters rest in "
            f"{bytes_text(self.stowed_bytes)}; all parameters take {bytes_text(self.rest_bytes)}, "
            f"{share:.3f} of {bytes_text(self.logical_bytes)} in their compute dtypes; "
            f"buffers {bytes_text(self.buffer_bytes)}",
        ]
        for place in ("ram", "disk", "stale"):
            kept = [row.master_bytes for row in self.rows if row.master == place]
            if kept:
                lines.append(f"{len(kept)} masters ({place}) take {bytes_text(sum(kept))}")
        if measured := [row for row in self.rows if row.worst_block is not None]:
            worst = max(measured, key=lambda row: row.worst_block_error or 0)
            error = number_text(worst.worst_block_error)
            lines.append(
                f"worst block: relative {error}, number {worst.worst_block} of {worst.name}"
            )
        if self.saturated:
            lines.append(_saturation(self.rows))
        for operator, times in sorted(self.fallbacks.items()):
            lines.append(f"{operator} dequantized whole weights {times} times in this process")
        return "\n".join(lines)


_HEAD = ("weight", "storage", "compute", "working", "tier", "shard", "wire", "logical", "rest",
         "max error", "rms", "relative", "worst block", "saturated", "reason")  # fmt: skip


def _cells(row: Row) -> tuple[str, ...]:
    name = row.name + (f" (= {', '.join(row.also)})" if row.also else "")
    numbers = (row.max_error, row.rms_error, row.relative_error, row.worst_block_error)
    errors = (number_text(e) for e in numbers)
    saturated = "" if row.saturated is None else str(row.saturated)
    left = (
        name,
        row.storage or "plain",
        row.compute,
        row.working,
        row.tier,
        row.shard,
        row.wire or "",
    )
    sizes = (bytes_text(row.logical_bytes), bytes_text(row.rest_bytes))
    return (*left, *sizes, *errors, saturated, row.reason)


def _saturation(rows: Sequence[Row]) -> str:
    """How many values were clipped, and where most."""
    clipped = [row for row in rows if row.saturated]
    worst = max(clipped, key=lambda row: row.saturated or 0)
    total = sum(row.saturated or 0 for row in clipped)
    where = f"in {worst.name}"
    if len(clipped) > 1:
        where = f"in {len(clipped)} weights, most in {worst.name} ({worst.saturated})"
    return f"{total} value{'s' if total > 1 else ''} saturated, {where}"


def report(model: nn.Module) -> Report:
    """Describes every parameter of `model`, and its buffers that rest, as they are now. Changes
    nothing."""
    seen: Seen = set()
    blocks = block_paths(model)
    rows = [_row(held, seen, blocks) for held in parameters(model)]
    plain_buffers = []
    for held in buffers(model):
        if isinstance(held.tensor, StowedTensor) or _recall(held)[0]:
            rows.append(_row(held, seen, blocks))
        else:
            plain_buffers.append(held.tensor)
    buffer_bytes = sum(_rest_bytes(tensor, seen) for tensor in plain_buffers)
    return Report(tuple(rows), buffer_bytes, fallbacks())


def _row(held: Held, seen: Seen, blocks: list[str]) -> Row:
    tensor = held.tensor
    storage = tensor.storage if isinstance(tensor, StowedTensor) else None
    reason, loss = _recall(held)
    master, master_bytes = state_of(held)
    return Row(
        name=held.name,
        also=held.names[1:],
        shape=tuple(tensor.shape),
        storage=storage,
        compute=str(tensor.dtype).removeprefix("torch."),
        tier=_tier(tensor),
        shard="whole",
        wire=None,
        logical_bytes=tensor.numel() * tensor.dtype.itemsize,
        rest_bytes=_rest_bytes(tensor, seen),
        reason=reason,
        master=master,
        master_bytes=master_bytes,
        working=mode_of(held, blocks),
        **({} if loss is None else dataclasses.asdict(loss)),
    )


def _rest_bytes(tensor: torch.Tensor, seen: Seen) -> int:
    return 0 if tensor.is_meta else new_bytes(memory(tensor), seen)


def _tier(tensor: torch.Tensor) -> str:
    if tensor.is_meta:
        return "none"
    if tensor.device.type != "cpu":
        return "accelerator"
    if isinstance(tensor, StowedTensor):
        memory = tensor.parts["codes"].untyped_storage()
        if not (memory.resizable() or memory.is_shared()):
            return "disk"  # borrowed: mapped from a file, paged in on use
    return "ram"


def remember(
    held: Held,
    weight: torch.Tensor,
    reason: str,
    loss: Loss | None = None,
    *,
    temporary: bool = False,
) -> None:
    """Keeps, with the modules that hold it, why a parameter is as it is, and its error. A
    `temporary` memory is of codes that will go again: what was known of those before stays."""
    made = None
    if isinstance(weight, StowedTensor):
        made = () if loss is None else stamp(memory(weight))
    for site in held.sites:
        known = site.module.__dict__.setdefault(_MEMORIES, {})
        earlier = known.get(site.attribute) if temporary else None
        if earlier is not None and earlier.earlier is not None:
            earlier = earlier.earlier  # of two temporary ones, the first is out of date
        known[site.attribute] = _Memory(reason, loss, made, earlier)


def _recall(held: Held) -> tuple[str, Loss | None]:
    site, resting = held.sites[0], isinstance(held.tensor, StowedTensor)
    known: _Memory | None = site.module.__dict__.get(_MEMORIES, {}).get(site.attribute)
    if known is None or (known.stamp is not None) != resting:
        return "", None
    if not isinstance(held.tensor, StowedTensor) or known.loss is None:
        return known.reason, None
    now = stamp(memory(held.tensor))
    if known.earlier is not None and known.stamp != now:
        known = known.earlier
    # A weight that was written since has an error that nobody measured.
    return known.reason, known.loss if known.stamp == now else None


def loss_of(held: Held) -> Loss | None:
    """The error of a resting weight, if it was measured on these very codes."""
    return _recall(held)[1]

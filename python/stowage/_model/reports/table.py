# SPDX-License-Identifier: Apache-2.0
"""What a report of a model holds and shows: one row for each weight, sums, a table in plain
text, and a page, which the core writes."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stowage._ops import library
from stowage._ops.errors import translated
from stowage._ops.texts import write_text


@dataclass(frozen=True)
class Row:
    """One weight of a report, by its name: `report["layer.weight"]`.

    Errors are None where the values it was made from were not at hand, or where the weight has been
    written since.

    Example:
        >>> row = stowage.stow(model, "int8:row")["0.weight"]
        >>> row.storage, row.rest_bytes, row.logical_bytes
        ('int8:row', 4352, 16384)
    """

    name: str  # of the parameter
    also: tuple[str, ...]  # further names of a tied weight
    shape: tuple[int, ...]  # of the values
    storage: str | None  # None: plain
    compute: str  # the compute dtype, as torch names it
    tier: str  # accelerator, ram, disk; none for a meta tensor
    shard: str  # whole, or which rows are here
    wire: str | None  # what travels between ranks; None where the weight is whole
    logical_bytes: int  # in the compute dtype
    rest_bytes: int  # what this weight adds: bytes that an earlier row holds are not counted again
    reason: str  # why it rests so, or is plain
    working: str = ""  # how much of it is widened at once (docs/working.md); "" of a plain one
    max_error: float | None = None  # the largest |x - q|
    rms_error: float | None = None  # the root of the mean square of x - q
    relative_error: float | None = None  # of all values: ||x - q|| / ||x||
    saturated: int | None = None  # values that became the largest one
    nonfinite: int | None = None  # values that are NaN or infinite
    worst_block_error: float | None = None  # relative, of values that share a scale
    worst_block: int | None = None  # the place of that scale in its part
    master: str | None = None  # where the exact values are: ram, disk; stale: not of this weight
    master_bytes: int = 0  # of the exact values
    whole_bytes: int = 0  # at rest in all processes, each row once; rest_bytes where it is whole


Row.__module__ = "stowage._model.rows"  # pickles name it


@dataclass(frozen=True)
class Report:
    """What `stow`, `report` and others tell of a model: one row for each parameter, and totals.

    Buffers that rest or were asked to have a row too. `str()` is a table; `to_json()` has every
    field.

    Example:
        >>> report = stowage.stow(model, "int8:row")
        >>> len(report.rows), len(report.stowed), report.stowed_bytes
        (4, 2, 8704)
    """

    rows: tuple[Row, ...]  # in the order of the model
    buffer_bytes: int  # of all buffers
    fallbacks: Mapping[str, int]  # of this process: operators that dequantized whole weights
    model: str = "model"  # its class
    engine: str | None = None  # what fetched its weights, in words; None: not offloaded
    formed_bytes: int = 0  # of parts that its file has in another order, put in order by `load`
    forming: float = 0.0  # seconds that this took

    @property
    def stowed(self) -> tuple[Row, ...]:
        """The rows of weights that rest."""
        return tuple(row for row in self.rows if row.storage is not None)

    @property
    def plain(self) -> tuple[Row, ...]:
        """The rows of all others."""
        return tuple(row for row in self.rows if row.storage is None)

    @property
    def rest_bytes(self) -> int:
        """Bytes of all parameters as they are."""
        return sum(row.rest_bytes for row in self.rows)

    @property
    def whole_bytes(self) -> int:
        """Bytes of all parameters in all processes, each row once; `rest_bytes` is what is here."""
        return sum(row.whole_bytes for row in self.rows)

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
        """The report as JSON.

        Returns:
            Totals, and every field of every row.
        """
        totals = {
            "parameters": len(self.rows),
            "stowed": len(self.stowed),
            "logical_bytes": self.logical_bytes,
            "rest_bytes": self.rest_bytes,
            "stowed_bytes": self.stowed_bytes,
            "whole_bytes": self.whole_bytes,
            "master_bytes": self.master_bytes,
            "buffer_bytes": self.buffer_bytes,
            "formed_bytes": self.formed_bytes,
            "forming": self.forming,
            "saturated": self.saturated,
            "fallbacks": dict(self.fallbacks),
        }
        rows = [dataclasses.asdict(row) for row in self.rows]
        return json.dumps({"totals": totals, "rows": rows}, indent=1)

    def html(
        self,
        path: str | os.PathLike[str],
        *,
        plan: Planned | None = None,
        measured: Figures | Mapping[str, Any] | None = None,
    ) -> None:
        """Writes a page that needs no other: bytes by storage, kind and tier, and every row.

        Args:
            path: the file.
            plan: of the model: memory over the pass is shown too.
            measured: what `stowage.measured` gave, shown beside what the plan predicted.

        Raises:
            FileError: it cannot be written.
        """
        document = {
            "stowage_report": 1,
            "model": self.model,
            "weights": [_page_row(row) for row in self.rows],
            "notes": self._notes(),
        }
        write_page(path, document, plan, measured)

    def __str__(self) -> str:
        return "\n".join([table(_HEAD, [_cells(row) for row in self.rows]), *self._notes()])

    def _notes(self) -> list[str]:
        """Sums and what else is true of the whole model, a line each."""
        share = self.whole_bytes / self.logical_bytes if self.logical_bytes else 1.0
        lines = [
            f"{len(self.stowed)} of {len(self.rows)} parameters rest in "
            f"{bytes_text(self.stowed_bytes)}; all parameters take {bytes_text(self.whole_bytes)}, "
            f"{share:.3f} of {bytes_text(self.logical_bytes)} in their compute dtypes; "
            f"buffers {bytes_text(self.buffer_bytes)}",
        ]
        if any(row.shard != "whole" for row in self.rows):
            lines.append(
                f"spread over processes: {bytes_text(self.rest_bytes)} of these "
                f"{bytes_text(self.whole_bytes)} are here"
            )
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
        if self.formed_bytes:
            lines.append(
                f"{bytes_text(self.formed_bytes)} that the file has in another order were put in "
                f"order in {self.forming:.3f} s"
            )
        if self.engine is not None:
            lines += self.engine.splitlines()
        return lines


Report.__module__ = "stowage._model.rows"  # pickles name it

_HEAD = ("weight", "storage", "compute", "working", "tier", "shard", "wire", "logical", "rest",
         "of", "max error", "rms", "relative", "worst block", "saturated", "reason")  # fmt: skip


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
    whole = "" if row.shard == "whole" else bytes_text(row.whole_bytes)
    return (*left, *sizes, whole, *errors, saturated, row.reason)


def _page_row(row: Row) -> dict[str, Any]:
    """As the page of the core reads it."""
    return {
        "name": row.name,
        "storage": row.storage or _SHORT.get(row.compute, row.compute),
        "shape": row.shape,
        "bytes": row.rest_bytes,
        "compute": _SHORT.get(row.compute, row.compute),
        "tier": row.tier,
        "max_error": _finite(row.max_error),
        "relative_error": _finite(row.relative_error),
    }


_SHORT = {"float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16"}


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


def _saturation(rows: Sequence[Row]) -> str:
    """How many values were clipped, and where most."""
    clipped = [row for row in rows if row.saturated]
    worst = max(clipped, key=lambda row: row.saturated or 0)
    total = sum(row.saturated or 0 for row in clipped)
    where = f"in {worst.name}"
    if len(clipped) > 1:
        where = f"in {len(clipped)} weights, most in {worst.name} ({worst.saturated})"
    return f"{total} value{'s' if total > 1 else ''} saturated, {where}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; a column without any content is left out."""
    kept = [i for i in range(len(head)) if i == 0 or any(row[i] for row in rows)]
    lines = [[row[i] for i in kept] for row in (head, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(kept))]
    lines.insert(1, ["-" * width for width in widths])
    padded = (zip(line, widths, strict=True) for line in lines)
    return "\n".join("  ".join(c.ljust(w) for c, w in cells).rstrip() for cells in padded)


def bytes_text(count: int) -> str:
    """1536 -> "1.5 KiB"."""
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def number_text(value: float | None) -> str:
    return "" if value is None else f"{value:.2e}"


class Planned(Protocol):
    """A plan: see `stowage.Plan`."""

    def to_json(self) -> str: ...


class Figures(Protocol):
    """What passes took: see `stowage.measured`."""

    def figures(self) -> dict[str, Any]: ...


def write_page(
    path: str | os.PathLike[str],
    document: Mapping[str, Any],
    plan: Planned | None,
    measured: Figures | Mapping[str, Any] | None,
) -> None:
    """`document`: a report as docs/cli.md has it. Raises FileError where it cannot be written."""
    figures = {} if measured is None else measured
    took = dict(figures) if isinstance(figures, Mapping) else figures.figures()
    planned = "" if plan is None else plan.to_json()
    try:
        page = library.text(library.report_html(json.dumps(document), planned, json.dumps(took)))
    except RuntimeError as error:
        raise translated(error) from None
    write_text(path, page)

# SPDX-License-Identifier: Apache-2.0
"""Plain-text tables and the spelling of sizes in them."""

from __future__ import annotations

from collections.abc import Sequence


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

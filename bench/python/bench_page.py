# SPDX-License-Identifier: Apache-2.0
"""A page of what `make bench` or `make bench-peers` has measured, in one file: plots and tables.

Rows with a peer become lines of milliseconds over rows of x, others bars of the share of their
limit. Nothing is loaded from elsewhere, no script runs.
Run: python bench/python/bench_page.py build/bench/kernels.json  (writes kernels.html beside it)
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path
from typing import Any

Row = dict[str, Any]
COLOURS = ("#1565c0", "#c62828", "#2e7d32", "#6a1b9a", "#ef6c00", "#00838f", "#8d6e63", "#546e7a",
           "#ad1457", "#9e9d24", "#283593", "#00695c", "#f9a825", "#7cb342", "#000000",
           "#ba68c8")  # fmt: skip
LEFT, TOP, WIDTH, HEIGHT = 64, 14, 640, 300  # of the area that lines are drawn in
STYLE = """body{margin:0;background:#fafafa;color:#222;font:15px/1.5 sans-serif}
main{max-width:940px;margin:0 auto;padding:24px}h1{font-size:22px}h2{font-size:17px}
section{background:#fff;border:1px solid #ddd;border-radius:8px;padding:8px 18px;margin:16px 0}
table{border-collapse:collapse;font-size:13px}td,th{padding:3px 12px 3px 0;text-align:right}
td:first-child,th:first-child{text-align:left}tr+tr{border-top:1px solid #eee}
svg{max-width:100%;height:auto}.legend span{display:inline-block;margin-right:18px}
.legend i{display:inline-block;width:16px;height:4px;margin-right:6px;vertical-align:middle}
.wide{overflow-x:auto}"""


# ---- pieces ----
def svg(body: str, width: int, height: int) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" font-family="sans-serif" font-size="12">\n{body}</svg>\n'
    )


def text(x: float, y: float, content: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(content)}</text>\n'


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    def line(tag: str, cells: Iterable[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(c)}</{tag}>" for c in cells) + "</tr>\n"

    inside = line("th", head) + "".join(line("td", cells) for cells in rows)
    return f'<div class="wide"><table>\n{inside}</table></div>\n'


def legend(names: Iterable[str]) -> str:
    spans = (
        f'<span><i style="background:{COLOURS[i % len(COLOURS)]}"></i>{escape(name)}</span>'
        for i, name in enumerate(names)
    )
    return f'<p class="legend">{"".join(spans)}</p>\n'


def document(title: str, about: str, sections: Iterable[str]) -> str:
    inside = "".join(f"<section>\n{section}</section>\n" for section in sections)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f"<title>{escape(title)}</title>\n<style>\n{STYLE}\n</style></head>\n"
        f"<body><main>\n<h1>{escape(title)}</h1>\n<p>{escape(about)}</p>\n"
        f"{inside}</main></body></html>\n"
    )


# ---- plots ----
def bars(rows: dict[str, dict[int, float]], threads: list[int]) -> str:
    """Of each name a bar for each number of threads, and where the limit is."""
    most = max([1.0, *(value for found in rows.values() for value in found.values())])
    left, across, high = 260, 500, 15 * len(threads) + 8
    height = TOP + high * len(rows) + 6
    at_limit = left + across / most
    body = ""
    for i, (name, found) in enumerate(rows.items()):
        y = TOP + high * i
        body += text(left - 8, y + high / 2, name, 'text-anchor="end"')
        for j, count in enumerate(threads):
            length = across * found.get(count, 0.0) / most
            body += f'<rect x="{left}" y="{y + 15 * j}" width="{length:.1f}" height="13" '
            body += f'fill="{COLOURS[j % len(COLOURS)]}"/>'
            if count in found:
                body += text(left + length + 5, y + 15 * j + 11, f"{found[count]:.2f}")
    body += f'<path d="M{at_limit:.1f} 0V{height}" stroke="#222" stroke-dasharray="5 4"/>\n'
    return svg(body, left + across + 60, height)


def decades(values: list[float]) -> list[float]:
    """1, 2 and 5 times powers of ten, from below all values to above them."""
    low = math.floor(math.log10(min(values)))
    every = [m * 10.0**e for e in range(low, low + 12) for m in (1, 2, 5)]
    first = max(i for i, tick in enumerate(every) if tick <= min(values))
    last = min(i for i, tick in enumerate(every) if tick >= max(values))
    return every[first : max(last, first + 1) + 1]


def curves(found: dict[str, dict[int, float]], bold: Callable[[str], bool]) -> str:
    """Milliseconds over rows of x, both logarithmic; each name has the colour of its legend."""
    xs = sorted({x for points in found.values() for x in points})
    ticks = decades([y for points in found.values() for y in points.values()])

    def x_of(x: float) -> float:
        first, last = math.log(xs[0]), math.log(xs[-1])
        return LEFT + WIDTH * (math.log(x) - first) / ((last - first) or 1)

    def y_of(y: float) -> float:
        low, high = math.log(ticks[0]), math.log(ticks[-1])
        return TOP + HEIGHT * (1 - (math.log(y) - low) / (high - low))

    body = ""
    for tick in ticks:
        body += f'<path d="M{LEFT} {y_of(tick):.1f}h{WIDTH}" stroke="#e4e4e4"/>'
        body += text(LEFT - 8, y_of(tick) + 4, f"{tick:g}", 'text-anchor="end"')
    for x in xs:
        body += text(x_of(x), TOP + HEIGHT + 18, str(x), 'text-anchor="middle"')
    body += text(LEFT + WIDTH, TOP + HEIGHT + 36, "rows of x; ms upwards", 'text-anchor="end"')
    for i, (name, points) in enumerate(found.items()):
        how = 'stroke-width="3"' if bold(name) else 'stroke-width="1.5" stroke-dasharray="6 3"'
        places = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in sorted(points.items()))
        body += f'<polyline points="{places}" fill="none" stroke="{COLOURS[i % len(COLOURS)]}" '
        body += f"{how}><title>{escape(name)}</title></polyline>\n"
    return svg(body, LEFT + WIDTH + 20, TOP + HEIGHT + 44)


# ---- kernels ----
def section_of(row: Row) -> str:
    name = row["name"]
    if name.endswith("-> bf16"):
        return "Dequantizing to bf16"
    if name.startswith("bf16 ->"):
        return "Quantizing bf16"
    return "Products" if name.startswith("linear") else "Limits"


def of_kernels(rows: list[Row]) -> str:
    threads = sorted({row["threads"] for row in rows})
    sections: dict[str, list[Row]] = {}
    for row in rows:
        sections.setdefault(section_of(row), []).append(row)
    shown = []
    for title, of in sections.items():
        ratios: dict[str, dict[int, float]] = {}
        for row in of:
            ratios.setdefault(row["name"], {})[row["threads"]] = row["ratio"]
        cells = (
            (row["name"], row["limit_name"], str(row["threads"]), f"{row['seconds'] * 1e3:.3f}",
             f"{row['gbps']:.2f}", f"{row['limit_gbps']:.2f}", f"{row['ratio']:.2f}")
            for row in of
        )  # fmt: skip
        head = ("kernel", "limit", "threads", "ms", "GB/s", "limit", "ratio")
        plot = "" if title == "Limits" else bars(ratios, threads)
        names = legend(f"{count} thread{'s' * (count > 1)}" for count in threads) if plot else ""
        shown.append(f"<h2>{title}</h2>\n{names}{plot}{table(head, cells)}")
    isas = ", ".join(sorted({row["isa"] for row in rows}))
    about = "Shares of the limit that was measured in the same process: the dashed line. " + isas
    return document("Kernels beside the limits of the machine", about, shown)


# ---- peers ----
def label(row: Row) -> str:
    ours = row["peer"] == "stowage"
    note = f", {row['note']}" if row["note"] else ""
    return row["name"] if ours else f"{row['peer']}: {row['name']}, {row['x']} x{note}"


def of_peers(rows: list[Row]) -> str:
    shown = []
    measured = [row for row in rows if row["ms"] is not None]
    ours = {label(row) for row in measured if row["peer"] == "stowage"}
    groups = dict.fromkeys((row["group"], row["threads"]) for row in measured)
    for group, threads in groups:
        of = [r for r in measured if (r["group"] in (group, "dense")) and r["threads"] == threads]
        if group == "dense":
            continue
        ms: dict[str, dict[int, float]] = {}
        ratios: dict[tuple[str, int], float] = {}
        for row in sorted(of, key=lambda row: row["peer"] != "stowage"):
            ms.setdefault(label(row), {})[row["rows"]] = row["ms"]
            ratios[label(row), row["rows"]] = row["ratio"]
        counts = sorted({row["rows"] for row in of})
        told = {at: f"{ms[at[0]][at[1]]:.2f} ({ratio:.2f})" for at, ratio in ratios.items()}
        cells = ((name, *(told.get((name, m), "") for m in counts)) for name in ms)
        title = f"<h2>{escape(group)}, {threads} thread{'s' * (threads > 1)}: ms</h2>\n"
        head = ["product", *(f"{m} row{'s' * (m > 1)} (of limit)" for m in counts)]
        plot = curves(ms, ours.__contains__)
        shown.append(title + legend(ms) + plot + table(head, cells))
    absent = dict.fromkeys(
        (row["peer"], row["name"], row["error"]) for row in rows if row["error"] is not None
    )
    if absent:
        shown.append("<h2>Not measured</h2>\n" + table(("peer", "product", "why"), absent))
    one = rows[0]
    about = f"{one['cpu']}, {one['isa']}, torch {one['torch']}; one weight of {one['shape']}. "
    about += "Medians, in turn in one process where peers bear it, weights out of the caches. "
    about += "In brackets the share of the limit: of reading the bytes at rest up to 16 rows, else "
    about += "of fp32 multiply-adds. Thick lines are Stowage's."
    return document("Products beside those of other libraries", about, shown)


def page(rows: list[Row]) -> str:
    return of_peers(rows) if any("peer" in row for row in rows) else of_kernels(rows)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("file", type=Path)
    given = asked.parse_args()
    target = given.file.with_suffix(".html")
    target.write_text(page(json.loads(given.file.read_text())))
    print(target)


if __name__ == "__main__":
    main()

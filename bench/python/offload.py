# SPDX-License-Identifier: Apache-2.0
"""Weights on a disk beside the limits of the machine: cold reads beside O_DIRECT, warm passes
beside all in memory, the cost of a use, and what the process holds beside the budget.

A chain of square linears is saved once, and dropped from the page cache before each cold pass.
Every figure is a ratio to a probe of the same run. Run:
python bench/python/offload.py [--json] [--layers 24] [--width 4096] [--storage int8] [--rounds 3]
"""

import argparse
import gc
import itertools
import json
import math
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

import stowage

PROBES = [(1 << 20, 4), (1 << 20, 8), (4 << 20, 2), (4 << 20, 4)]  # bytes of a read, threads
SMALL = 4 << 20  # bytes that stay in a CPU's cache


@dataclass(frozen=True)
class Row:
    """A ratio and its limit: the figure is good when it is `better` than the limit."""

    name: str
    figure: float
    limit: float | None
    better: str  # "above" or "below"
    detail: str

    @property
    def met(self) -> bool | None:
        if self.limit is None:
            return None
        return self.figure >= self.limit if self.better == "above" else self.figure <= self.limit


def chain(layers: int, width: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def write(folder: Path, layers: int, width: int, storage: str) -> None:
    """Layer by layer, so that the float chain never exists whole."""
    torch.manual_seed(0)
    model = nn.Sequential()
    for _ in range(layers):
        layer = nn.Sequential(nn.Linear(width, width, bias=False, dtype=torch.bfloat16))
        stowage.stow(layer, storage, measure=False)
        model.append(layer[0])
    stowage.save(model, folder, checksums=False)


def forget(path: Path) -> None:
    """Out of the page cache."""
    with open(path, "rb") as file:
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def read_whole(path: Path, flags: int, piece: int, threads: int, memory: int) -> float:
    """Bytes a second of reads of `piece` bytes, in turn into `memory` bytes, touched before."""
    size = path.stat().st_size // 4096 * 4096
    handle = os.open(path, os.O_RDONLY | flags)
    slots = max(memory // piece, threads)
    buffer = mmap.mmap(-1, slots * piece, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer.madvise(mmap.MADV_HUGEPAGE)
    for at in range(0, len(buffer), 1 << 20):
        buffer[at : at + (1 << 20)] = b"x" * (1 << 20)
    view, next_piece = memoryview(buffer), itertools.count()

    def read(_: int) -> None:
        while (at := (number := next(next_piece)) * piece) < size:
            slot = number % slots * piece
            os.preadv(handle, [view[slot : slot + min(piece, size - at)]], at)

    try:
        with ThreadPoolExecutor(threads) as pool:
            taken = seconds(lambda: list(pool.map(read, range(threads))))
    finally:
        os.close(handle)
        view.release()
        buffer.close()
    return size / taken


def held_now() -> int:
    """RssAnon + RssFile."""
    lines = Path("/proc/self/status").read_text().splitlines()
    facts = dict(line.split(":", 1) for line in lines if line.startswith("Rss"))
    return sum(int(facts[name].split()[0]) for name in ("RssAnon", "RssFile")) * 1024


def load(folder: Path, args: argparse.Namespace, ram: int, reads: str) -> nn.Module:
    model = stowage.load(lambda: chain(args.layers, args.width), folder, ram=ram, reads=reads)
    return model.eval().requires_grad_(False)


def cold(folder: Path, args: argparse.Namespace, x: torch.Tensor) -> list[Row]:
    """One token through a chain three layers of which fit, from a cold file, beside reads of the
    file into as many bytes; what reads into a few bytes of a CPU's cache take is told too."""
    file = folder / "model.safetensors"
    size, ours, stalls, held = file.stat().st_size, [], [], []
    layer = size // args.layers
    room = 3 * (layer + (1 << 16))
    probes: dict[tuple[int, int, int], list[float]] = {
        (*probe, memory): [] for probe in PROBES for memory in (room, SMALL)
    }

    def probe_all() -> None:
        for piece, threads, memory in probes:
            forget(file)
            taken = read_whole(file, os.O_DIRECT, piece, threads, memory)
            probes[piece, threads, memory].append(taken)

    def ours_once() -> None:
        forget(file)
        before = held_now()
        model = load(folder, args, room, "direct")
        taken = seconds(lambda: model(x))
        report = stowage.engine_report(model)
        ours.append(size / taken)
        stalls.append(report.stall / taken)
        held.append((held_now() - before) / report.peak)

    for turn in range(args.rounds + 1):  # the first warms caches below this system's: left out
        for run in (probe_all, ours_once) if turn % 2 else (ours_once, probe_all):
            run()
    rates = {key: statistics.median(seen[1:]) for key, seen in probes.items()}
    probe, small = (max(r for k, r in rates.items() if k[2] == memory) for memory in (room, SMALL))
    rate, stall = statistics.median(ours[1:]), statistics.median(stalls[1:])
    detail = f"{rate / 1e9:.2f} of {probe / 1e9:.2f} GB/s, the best of {len(PROBES)} ways to read"
    detail += f" ({small / 1e9:.2f} into {SMALL >> 20} MiB), {stall:.0%} of it waiting"
    return [
        Row("cold, of O_DIRECT", rate / probe, 0.95, "above", detail),
        Row("memory, of what three layers take", max(held), 1.05, "below", "RssAnon + RssFile"),
    ]


def warm(folder: Path, args: argparse.Namespace, x: torch.Tensor) -> list[Row]:
    """Passes over a cached file that fits the budget, beside all in memory."""
    size = (folder / "model.safetensors").stat().st_size
    resident = stowage.load(lambda: chain(args.layers, args.width), folder)
    resident.eval().requires_grad_(False)
    mapped = load(folder, args, 2 * size, "mapped")
    runs = {"resident": partial(resident, x), "mapped": partial(mapped, x)}
    runs |= {"memory": partial(read_codes, resident), "file": partial(read_codes, mapped)}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(3 * args.rounds + 1):
        for name, run in runs.items():
            if turn:
                times[name].append(seconds(run))
            else:
                run()
    took = {name: statistics.median(taken) for name, taken in times.items()}
    ratio, reading = took["mapped"] / took["resident"], took["file"] / took["memory"]
    detail = f"{took['resident'] * 1e3:.1f} ms in memory"
    beside = f"torch.sum takes {reading:.3f} over the mapping of what it takes over memory"
    rows = [
        Row("warm, of all in memory", ratio, 1.05, "below", detail),
        Row("warm, beside torch.sum of the same bytes", ratio / reading, 1.05, "below", beside),
    ]
    del mapped, run, runs["mapped"], runs["file"]  # pages that are mapped stay as they are
    gc.collect()
    for name, ram in (("half", size // 2), ("three layers", 3 * size // args.layers + (1 << 16))):
        some = load(folder, args, ram, "mapped")
        best = {"some": math.inf, "all": math.inf}
        for _ in range(3 * args.rounds + 6):  # small pages are read anew in the sixth pass
            best["some"] = min(best["some"], seconds(lambda some=some: some(x)))
            best["all"] = min(best["all"], seconds(runs["resident"]))
        peak = stowage.engine_report(some).peak
        detail = f"held at most {peak / 2**20:.0f} MiB of {size / 2**20:.0f}"
        name += " in memory, warm, of all in memory"
        rows.append(Row(name, best["some"] / best["all"], None, "below", detail))
    path = folder / "model.safetensors"
    return [*rows, Row("us to map and unmap a cached page", pages(path), None, "below", "4 KiB")]


def pages(path: Path) -> float:
    """Microseconds that the system alone takes for a page that comes and goes, at best."""
    populate, step, best = 22, 16 << 20, math.inf  # MADV_POPULATE_READ of Linux 5.14
    with path.open("rb") as file:
        size = path.stat().st_size // mmap.PAGESIZE * mmap.PAGESIZE
        with mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as view:
            for _ in range(5):
                begun = time.perf_counter()
                for at in range(0, size, step):
                    view.madvise(populate, at, min(step, size - at))
                    view.madvise(mmap.MADV_DONTNEED, at, min(step, size - at))
                best = min(best, time.perf_counter() - begun)
    return best / (size / mmap.PAGESIZE) * 1e6


def read_codes(model: nn.Module) -> None:
    """All codes, where they lie, by torch and not by us."""
    for weight in model.parameters():
        assert isinstance(weight, stowage.StowedTensor)
        weight.parts["codes"].view(torch.int64).sum()


def watch(folder: Path, args: argparse.Namespace, x: torch.Tensor) -> list[Row]:
    """What it costs to ask for a report of each pass, and to trace it."""
    size = (folder / "model.safetensors").stat().st_size
    model = load(folder, args, 2 * size, "mapped")

    last = stowage.engine_report(model)

    def reported() -> None:
        nonlocal last
        model(x)
        now = stowage.engine_report(model)
        now.since(last)
        last = now

    def traced() -> None:
        with stowage.trace(os.devnull):
            traces.append(seconds(lambda: model(x)))

    plain, reports, traces = [], [], []
    model(x)
    for _ in range(10 * args.rounds):
        plain.append(seconds(lambda: model(x)))
        reports.append(seconds(reported))
        traced()
    alone = statistics.median(plain)
    rows = [("a report of each pass", reports, 1.01), ("inside a trace", traces, None)]
    return [
        Row(name, statistics.median(taken) / alone, limit, "below", f"{alone * 1e3:.1f} ms without")
        for name, taken, limit in rows
    ]


def use(args: argparse.Namespace) -> list[Row]:
    """Microseconds that the engine adds to the use of a weight that is in memory, and of one that
    is read again each time, from the page cache into a third of the file's bytes, beyond what
    reading it takes."""
    layers, width = 200, 256
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write(folder, layers, width, args.storage)
        small = argparse.Namespace(layers=layers, width=width)
        plain = stowage.load(lambda: chain(layers, width), folder).eval().requires_grad_(False)
        size = (folder / "model.safetensors").stat().st_size
        rooms = {"kept": 1 << 26, "read": size // 3}
        models = {name: load(folder, small, ram, "buffered") for name, ram in rooms.items()}
        models["plain"] = plain
        x = torch.ones(1, width, dtype=torch.bfloat16)
        times: dict[str, list[float]] = {name: [] for name in (*models, "copy")}
        for _ in range(20 * args.rounds + 3):
            for name, model in models.items():
                times[name].append(seconds(partial(model, x)))
            times["copy"].append(copy_pieces(folder / "model.safetensors", layers))
        read_again = stowage.engine_report(models["read"])
    took = {name: statistics.median(taken[3:]) / layers * 1e6 for name, taken in times.items()}
    detail = f"{took['plain']:.2f} us without"
    beyond = took["read"] - took["plain"] - took["copy"]
    again = f"{took['copy']:.2f} us to copy {size / layers / 1024:.0f} KiB, "
    again += f"{read_again.hits / read_again.acquired:.0%} were there in time"
    return [
        Row("us added to a use in memory", took["kept"] - took["plain"], 5.0, "below", detail),
        Row("us added to a use that is read, beyond the copy", beyond, 15.0, "below", again),
    ]


def copy_pieces(path: Path, count: int) -> float:
    """Seconds to read a cached file in so many pieces, into memory that is used again."""
    size = path.stat().st_size // count
    memory = memoryview(bytearray(size))
    with open(path, "rb", buffering=0) as file:
        handle = file.fileno()
        return seconds(lambda: [os.preadv(handle, [memory], at * size) for at in range(count)])


def measure(args: argparse.Namespace) -> list[Row]:
    x = torch.ones(1, args.width, dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory(dir=args.folder) as made, torch.inference_mode():
        folder = Path(made)
        write(folder, args.layers, args.width, args.storage)
        rows = [*cold(folder, args, x), *warm(folder, args, x)]
        return [*rows, *watch(folder, args, x), *use(args)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--storage", default="int8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where the chain is written; a disk, not a tmpfs")
    args = parser.parse_args()
    rows = measure(args)
    if args.json:
        print(json.dumps([{**asdict(row), "met": row.met} for row in rows], indent=2))
        return
    for row in rows:
        verdict = {None: "", True: "met", False: "NOT MET"}[row.met]
        limit = "" if row.limit is None else f"limit {row.limit:g}"
        print(f"{row.name:48} {row.figure:8.3f}  {limit:11} {verdict:8} {row.detail}")


if __name__ == "__main__":
    main()

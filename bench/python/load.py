# SPDX-License-Identifier: Apache-2.0
"""Loading a bf16 model warm into each storage, beside pread + memcpy of the same bytes.

A model of 2.4 GB lies in the page cache, in two shards. The limit is reading its bytes with pread
into memory that is used again, plus copying as many from memory to memory, on as many threads,
taken in turn with the loads of the same run; the medians count. Run:
python bench/python/load.py [--json] [--gigabytes 2.4] [--threads 2] [--rounds 3] [--only int8]
With --processor-time all seconds are those of the process on all its threads: for machines that
others use meanwhile. Before each load twice as much memory is touched and freed as the model takes,
until the host of a virtual machine has given all of it: what that takes is not loading.
"""

import argparse
import ctypes
import json
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

PIECE = 4 << 20
_TOUCHES = 20  # at most; what is small is there
HIDDEN, WIDE = 2048, 8192
# What it rests as and how many times the limit it may take; None: reported.
LIMITS: dict[str, float | None] = {
    "": 1.5,
    "bf16": 1.5,
    "f8_e4m3": 1.5,
    "f8_e5m2": 1.5,
    "f8_e4m3:row": 1.5,
    "int8": 1.5,
    "nf4": 2.0,
    "nf4:block64:nested": 2.0,
    "fp4": 2.0,
    "nf4:torchao": None,
}


@dataclass(frozen=True)
class Row:
    name: str
    seconds: float
    ratio: float  # to pread + memcpy
    limit: float | None

    @property
    def met(self) -> bool | None:
        return None if self.limit is None else self.ratio <= self.limit


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("q", "k", "v", "o"):
            setattr(self, name, nn.Linear(HIDDEN, HIDDEN, bias=False))
        self.gate, self.up = (nn.Linear(HIDDEN, WIDE, bias=False) for _ in range(2))
        self.down, self.norm = nn.Linear(WIDE, HIDDEN, bias=False), nn.RMSNorm(HIDDEN)


def model(layers: int) -> nn.Module:
    return nn.Sequential(*(Layer() for _ in range(layers)))


def write(folder: Path, gigabytes: float) -> int:
    """Returns how many layers it has. Filled layer by layer, in bf16 as most models come."""
    torch.manual_seed(0)
    layer = 2 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * WIDE)
    layers = max(1, round(gigabytes * 1e9 / layer))
    with torch.device("meta"):
        made = model(layers).bfloat16()
    made.to_empty(device="cpu")
    for parameter in made.parameters():
        parameter.data.normal_(std=0.02)
    size = stowage.nbytes(made)
    stowage.save(made, folder, shard_bytes=size // 2 + (1 << 20), checksums=False)
    return layers


clock = time.perf_counter


def seconds(run: Callable[[], object]) -> float:
    start = clock()
    run()
    return clock() - start


def limit(files: list[Path], threads: int) -> float:
    """Seconds of pread of all bytes, and of copying them."""
    buffers = [torch.ones(PIECE, dtype=torch.uint8) for _ in range(2 * threads)]
    pieces = [(f, at) for f in files for at in range(0, f.stat().st_size, PIECE)]
    opened = {file: os.open(file, os.O_RDONLY) for file in files}

    def read(which: int) -> None:
        memory = memoryview(buffers[which].numpy())
        for file, at in pieces[which::threads]:
            os.preadv(opened[file], [memory], at)

    source = torch.ones(64 << 20, dtype=torch.uint8)
    target = torch.ones(64 << 20, dtype=torch.uint8)
    total = sum(file.stat().st_size for file in files)
    half = len(source) // threads

    def copy(which: int) -> None:
        for _ in range(round(total / len(source))):
            at = which * half
            ctypes.memmove(target.data_ptr() + at, source.data_ptr() + at, half)

    with ThreadPoolExecutor(threads) as pool:
        taken = seconds(lambda: list(pool.map(read, range(threads))))
        taken += seconds(lambda: list(pool.map(copy, range(threads))))
    for handle in opened.values():
        os.close(handle)
    return taken


def touch(size: int, most: float) -> None:
    """New memory, all pages of it, given back at once; again until that takes `most` seconds."""
    for _ in range(_TOUCHES if size > 1 << 30 else 1):
        if seconds(partial(touch_once, size)) <= most:
            return


def touch_once(size: int) -> None:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    pages = torch.frombuffer(memory, dtype=torch.uint8)[:: mmap.PAGESIZE]
    pages.fill_(1)
    del pages
    memory.close()


def load(layers: int, folder: Path, storage: str | None) -> None:
    stowage.load(lambda: model(layers), folder, storage, measure=False)


def measure(args: argparse.Namespace) -> tuple[float, list[Row]]:
    torch.set_num_threads(args.threads)
    chosen = [name for name in LIMITS if args.only is None or name == args.only]
    times: dict[str, list[float]] = {name: [] for name in chosen}
    limits = []
    with tempfile.TemporaryDirectory(dir=args.folder) as made:
        folder = Path(made)
        layers = write(folder, args.gigabytes)
        files = sorted(folder.glob("*.safetensors"))
        limit(files, args.threads)  # into the page cache
        for name in chosen:
            for turn in range(args.rounds + 1):
                probe = limit(files, args.threads)
                touch(2 * sum(file.stat().st_size for file in files), most=2 * probe)
                taken = seconds(partial(load, layers, folder, name or None))
                if turn:  # after the first the heap has the size of these results
                    limits.append(probe)
                    times[name].append(taken)
    least = statistics.median(limits)
    rows = []
    for name in chosen:
        taken = statistics.median(times[name])
        rows.append(Row(name or "plain", taken, taken / least, LIMITS[name]))
    return least, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--gigabytes", type=float, default=2.4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=list(LIMITS))
    parser.add_argument("--folder", help="where the model is written; a disk, not a tmpfs")
    parser.add_argument("--processor-time", action="store_true")
    args = parser.parse_args()
    if args.processor_time:
        global clock
        clock = time.process_time
    least, rows = measure(args)
    if args.json:
        print(json.dumps([{**asdict(row), "met": row.met} for row in rows], indent=2))
        return
    print(f"pread + memcpy {least:.3f} s, {args.threads} threads")
    for row in rows:
        verdict = {None: "", True: "met", False: "NOT MET"}[row.met]
        allowed = "" if row.limit is None else f"limit {row.limit:g}"
        print(f"{row.name:20} {row.seconds:7.3f} s  {row.ratio:6.2f}x  {allowed:10} {verdict}")


if __name__ == "__main__":
    main()

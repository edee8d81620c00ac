# SPDX-License-Identifier: Apache-2.0
"""Products with one resting weight, beside those of other libraries with a comparable one.

All products of a number of threads are timed in turn in one process, medians, after 64 MiB of other
memory were written, so that weights come from memory; on one thread in processor time, which other
programs change less. A library that ends that process gets one of its own. Limits are the better of
those that `stowage bench` measures before and after: up to 16 rows of x reading the bytes at rest,
with more rows multiply-adds in fp32. What is not measured has a row with the reason.
`make bench-peers` installs the libraries; without it those that are installed are measured.
Run: python bench/python/peers.py [--size 4096] [--rows 1 8 32 128 512] [--threads 1 2]
     [--rounds 7] [--peers stowage torch] [--out build/bench] [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import bench_page
import torch
from peer_products import PEERS, Product, Unfit, cpu_name

import stowage

ROWS, THREADS, SIZE, ROUNDS = [1, 8, 32, 128, 512], [1, 2], 4096, 7
READ_ROWS = 16  # up to so many rows of x the limit is reading
LONG_S, FEWEST = 1.0, 3  # what takes longer than that runs so often only
PROCESS_S = 3600  # after which a process of products is ended
SEEN = "measured: "  # before what a process of its own prints
Row = dict[str, Any]


# --- one process ----------------------------------------------------------------------------------


def seconds(product: Product, x: Any) -> float:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    product.call(x)
    return clock() - start


class Measured:
    """The products of some peers with one weight, on as many threads as torch has."""

    def __init__(self, given: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.w = torch.randn(given.size, given.size).mul_(0.02).bfloat16()
        self._given = given
        self._threads = torch.get_num_threads()
        self._other = torch.ones(1 << 26, dtype=torch.uint8)
        self._products: dict[tuple[str, str], Product] = {}
        self.lines: list[Row] = []

    def line(self, peer: str, name: str, rows: int | None, **found: Any) -> None:
        storage = name if peer == "stowage" else None
        n = self._given.size
        made = {"name": name, "peer": peer, "storage": storage, "group": None, "rows": rows}
        made |= {"x": None, "threads": self._threads, "shape": f"{n} x {n}", "bytes": None}
        made |= {"ms": None, "limit_name": None, "limit_ms": None, "ratio": None}
        made |= {"relative_error": None, "isa": stowage.info()["instruction_set"]}
        made |= {"torch": torch.__version__, "cpu": cpu_name(), "load": os.getloadavg()[0]}
        made |= {"note": None, "error": None}
        self.lines.append(made | found)

    def make(self) -> None:
        for peer in self._given.peers:
            for name, maker in PEERS[peer].items():
                try:
                    self._products[peer, name] = maker(self.w, self._threads)
                except Exception as error:  # whatever a library raises is why it is not measured
                    self.line(peer, name, None, error=told(error))

    def forget(self) -> None:
        """What was at work leaves the caches, and threads that wait for more of it fall asleep."""
        self._other.add_(1)
        if self._threads > 1:
            time.sleep(0.01)

    def first(self, rows: int) -> tuple[dict[tuple[str, str], Any], dict[Any, tuple[float, float]]]:
        """What each product takes, and of those that work the error and the seconds of one run."""
        x = torch.randn(rows, self._given.size, dtype=torch.bfloat16)
        wanted = x.float() @ self.w.float().t()
        fed, works = {}, {}
        for key, product in self._products.items():
            try:
                fed[key] = product.feed(x)
                y = product.values(product.call(fed[key])).float()
                wrong = float((y - wanted).norm() / wanted.norm())
                works[key] = (wrong, seconds(product, fed[key]))
            except Exception as error:
                self.line(*key, rows, error=told(error))
        return fed, works

    def measure(self, rows: int) -> None:
        fed, works = self.first(rows)
        times: dict[Any, list[float]] = {key: [] for key in works}
        keys = list(works)
        for turn in range(self._given.rounds):
            first = turn % max(1, len(keys))
            for key in keys[first:] + keys[:first]:
                if works[key][1] > LONG_S and turn >= FEWEST:
                    continue
                self.forget()
                times[key].append(seconds(self._products[key], fed[key]))
        for key, found in times.items():
            self.tell(key, rows, statistics.median(found) * 1e3, works[key][0])

    def tell(self, key: tuple[str, str], rows: int, ms: float, wrong: float) -> None:
        of = self._products[key]
        found: Row = {"group": of.group, "x": of.x, "note": of.note, "bytes": of.rest_bytes}
        self.line(*key, rows, **found, ms=ms, relative_error=wrong)


def told(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0][:300]
    return first if isinstance(error, Unfit) else f"{type(error).__name__}: {first}"


@torch.no_grad()
def in_this_process(given: argparse.Namespace) -> list[Row]:
    torch.set_num_threads(given.threads[0])
    measured = Measured(given)
    measured.make()
    for rows in given.rows:
        measured.measure(rows)
    return measured.lines


# --- all of them ----------------------------------------------------------------------------------


def program() -> str:
    """The program of the package whose Python this is."""
    own = Path(sysconfig.get_path("scripts"), "stowage")
    found = str(own) if own.exists() else shutil.which("stowage")
    if found is None:
        raise SystemExit("peers.py: the program `stowage` must be installed beside Python")
    return found


def limits(threads: int, quick: bool) -> dict[str, float]:
    """GB/s or GFLOP/s by the name of the limit; no row of a kernel is called so."""
    asked = [program(), "bench", "--json", "--only", "limits alone", "--threads", str(threads)]
    out = subprocess.check_output([*asked, *(["--quick"] if quick else [])], text=True)
    return {row["limit_name"]: row["gbps"] for row in json.loads(out) if row["threads"] == threads}


def limited(row: Row, size: int, rates: dict[str, float]) -> Row:
    """With the limit of the product, and the share of it that was reached."""
    if row["ms"] is None:
        return row
    reads = row["rows"] <= READ_ROWS
    name = "read" if reads else "multiply-add (gflops)"
    limit = (row["bytes"] if reads else 2.0 * row["rows"] * size**2) / rates[name] / 1e6
    return row | {"limit_name": name, "limit_ms": limit, "ratio": limit / row["ms"]}


def child(given: argparse.Namespace, peers: list[str], threads: int) -> list[Row] | str:
    """The rows of a process of these peers, or how it ended."""
    asked = [sys.executable, __file__, "--here", "--threads", str(threads)]
    asked += ["--size", str(given.size), "--rounds", str(given.rounds), "--peers", *peers]
    asked += ["--rows", *map(str, given.rows)]
    around = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            asked, env=around, stdout=subprocess.PIPE, text=True, timeout=PROCESS_S
        )
    except subprocess.TimeoutExpired:
        return f"its process took more than {PROCESS_S} s"
    for line in done.stdout.splitlines():
        if line.startswith(SEEN):
            rows: list[Row] = json.loads(line[len(SEEN) :])
            return rows
    return f"its process ended with status {done.returncode}"


def gathered(given: argparse.Namespace, threads: int) -> list[Row]:
    """In one process; if that ends, each library that is not ours or torch's in its own."""
    found = child(given, given.peers, threads)
    if not isinstance(found, str):
        return found
    print(f"peers.py: {found}: each library gets one of its own", file=sys.stderr)
    own = [[peer] for peer in given.peers if peer not in ("stowage", "torch")]
    rows: list[Row] = []
    for peers in [[p for p in given.peers if [p] not in own], *own]:
        answer = child(given, peers, threads) if peers else []
        if isinstance(answer, str):
            empty = Measured(argparse.Namespace(size=given.size))
            for peer in peers:
                for name in PEERS[peer]:
                    empty.line(peer, name, None, threads=threads, error=answer)
            answer = empty.lines
        rows += answer
    return rows


def measured(given: argparse.Namespace, threads: int) -> list[Row]:
    before = limits(threads, given.quick)
    rows = gathered(given, threads)
    after = limits(threads, given.quick)
    rates = {name: max(rate, after[name]) for name, rate in before.items()}
    return [limited(row, given.size, rates) for row in rows]


def with_reasons(rows: list[Row], reasons: dict[str, str]) -> list[Row]:
    """A library that could not be installed is absent for that reason, not for its ImportError."""
    return [
        row | {"error": reasons[row["peer"]]} if row["error"] and row["peer"] in reasons else row
        for row in rows
    ]


def table(rows: list[Row]) -> str:
    lines = [f"{'peer':18s} {'product':42s} {'x':12s} threads rows       ms  of limit  error"]
    for row in rows:
        name = f"{row['peer']:18s} {row['name'][:42]:42s}"
        if row["error"] is not None:
            lines.append(f"{name} {row['error']}")
            continue
        lines.append(
            f"{name} {row['x']:12s} {row['threads']:7d} {row['rows']:4d} {row['ms']:8.2f} "
            f"{row['ratio']:9.2f} {row['relative_error']:6.4f} {row['note'] or ''}".rstrip()
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    about = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    about.add_argument("--size", type=int, default=SIZE)
    about.add_argument("--rows", type=int, nargs="+", default=ROWS)
    about.add_argument("--threads", type=int, nargs="+", default=THREADS)
    about.add_argument("--rounds", type=int, default=ROUNDS)
    about.add_argument("--peers", nargs="+", default=list(PEERS), choices=list(PEERS))
    about.add_argument("--out", type=Path, default=Path("build/bench"))
    about.add_argument("--reasons", type=Path, help="JSON: why a library is not installed")
    about.add_argument("--quick", action="store_true", help="512 x 512, few rows, ours and torch's")
    about.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = about.parse_args(arguments)
    if given.quick:
        given.size, given.rows, given.threads, given.rounds = 512, [1, 32], [1], 2
        given.peers = ["stowage", "torch"]
    if given.here:
        print(SEEN + json.dumps(in_this_process(given)), flush=True)
        return
    rows = [row for threads in given.threads for row in measured(given, threads)]
    rows = with_reasons(rows, json.loads(given.reasons.read_text()) if given.reasons else {})
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "peers.json").write_text(json.dumps(rows, indent=1) + "\n")
    (given.out / "peers.html").write_text(bench_page.page(rows))
    print(f"{table(rows)}\n{given.out / 'peers.json'}, {given.out / 'peers.html'}")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""How far products by resting weights are from fp64, beside how long they take.

y* is the fp64 product of x with the dequantized weight, so that the error is the product's alone,
not that of quantizing. The relative error of an element is |y - y*| / sum_k |w_k| |x_k|: its
largest and its root mean square are told, and the largest |y - y*| over its bound of
docs/numbers.md. Data are normal, heavy-tailed (Student's t with 2 degrees) and cancelling: column
k of w is minus column k + K / 2 but for 2^-12 of it, and x is the same there. Times are medians,
of normal data, after 64 MiB of other memory were written, on one thread of the processor; all of it
takes a quarter of an hour. A row over the bound is marked OVER, and the status is 1.
Run: python bench/python/accuracy.py [--size 4096] [--rows 1 4 16 64 512] [--storages nf4 q4_k]
     [--threads 1] [--rounds 5] [--out build/bench] [--quick]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accuracy_bound import Errors, Truth, Way
from torch import Tensor
from torch.nn import functional as F

import stowage

STORAGES = ["f8_e4m3:row", "f8_e5m2:row", "f8_e4m3:block128x128", "int8:row", "int8:block32:f16",
            "nf4", "nf4:block64:nested", "fp4", "int4:block32:bf16", "int4:block64:bf16:zero",
            "mxfp4", "nvfp4", "q4_k", "q6_k"]  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "f16": torch.float16}
ROWS = [1, 4, 16, 64, 512]
LONG_S = 0.5  # of a run, after which no other one is timed
POLICIES = {"default": False, "exact": True}
Call = Callable[[Tensor, Tensor], Tensor]
Row = dict[str, Any]


# --- data -----------------------------------------------------------------------------------------


def normal(rows: int, size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, size), torch.randn(size, size) * 0.02


def heavy(rows: int, size: int) -> tuple[Tensor, Tensor]:
    """A normal number over the root of half a chi-square of two degrees, which is exponential."""

    def student(*shape: int) -> Tensor:
        return torch.randn(shape) / torch.empty(shape).exponential_().sqrt()

    return student(rows, size), student(size, size) * 0.02


def cancelling(rows: int, size: int) -> tuple[Tensor, Tensor]:
    half = torch.randn(size, size // 2)
    w = torch.cat([half, -half], 1) + torch.randn(size, size) * 2.0**-12
    return torch.randn(rows, size // 2).repeat(1, 2), w


DATA = {"normal": normal, "heavy": heavy, "cancelling": cancelling}


# --- measuring ------------------------------------------------------------------------------------


def milliseconds(call: Callable[[], object], rounds: int) -> float:
    """The median after a first run, which counts where it is the only one: of no rounds (the weight
    is then wherever it is), or where it is long."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    other, times = torch.ones(1 << 26 if rounds else 1, dtype=torch.uint8), []
    for turn in range(rounds + 1):
        other.add_(1)
        start = clock()
        call()
        times.append(clock() - start)
        if turn == 0 and times[0] > LONG_S:
            break
    return statistics.median(times[1:] or times) * 1e3


def of_storage(given: argparse.Namespace, storage: str, dtype: str, product: Call) -> list[Row]:
    """All rows and policies of one storage and dtype of x, over all data."""
    isa: str = stowage.info()["instruction_set"]
    lines: dict[tuple[int, str], Row] = {}
    for name, make in DATA.items():
        torch.manual_seed(0)
        x, values = make(max(given.rows), given.size)
        x = x.to(DTYPES[dtype])
        for policy, exact in POLICIES.items():
            weight = stowage.quantize(values, storage, compute_dtype=DTYPES[dtype], exact=exact)
            if exact is False:
                truth = Truth.of(x, weight.dequantize())
            for rows in given.rows:
                way = Way(storage, DTYPES[dtype], rows, exact, isa)
                errors = Errors.of(product(x[:rows], weight), truth.rows(rows), way)
                line = lines.setdefault((rows, policy), {})
                line[name] = errors
                if name == "normal":
                    call = lambda x=x[:rows], w=weight: product(x, w)  # noqa: E731
                    line["ms"] = milliseconds(call, given.rounds)
    return [told(storage, dtype, rows, policy, isa, line) for (rows, policy), line in lines.items()]


def told(storage: str, dtype: str, rows: int, policy: str, isa: str, line: Row) -> Row:
    made = {"storage": storage, "x": dtype, "rows": rows, "policy": policy, "isa": isa}
    made |= {"threads": torch.get_num_threads(), "ms": line["ms"]}
    for name in DATA:
        finite = {k: v if math.isfinite(v) else None for k, v in asdict(line[name]).items()}
        made[name] = finite  # None: NaN or infinite
    return made | {"over": [name for name in DATA if line[name].over]}


@torch.inference_mode()
def measured(given: argparse.Namespace, product: Call = F.linear) -> list[Row]:
    lines = []
    for storage in given.storages:
        for dtype in given.dtypes:
            lines += of_storage(given, storage, dtype, product)
            if sys.stderr.isatty():
                print(f"{storage} {dtype}", file=sys.stderr)
    return lines


# --- telling --------------------------------------------------------------------------------------


def table(lines: list[Row]) -> str:
    head = ["storage", "x", "rows", "policy", "ms"]
    for name in DATA:
        head += [f"{name}: max", "rms", "of bound"]
    shown = [f"| {' | '.join([*head, ''])} |", "|---" * (len(head) + 1) + "|"]
    for line in lines:
        cells = [f"`{line['storage']}`", line["x"], str(line["rows"]), line["policy"]]
        cells.append(f"{line['ms']:.2f}")
        for name in DATA:
            found = [line[name][key] for key in ("largest", "rms", "of_bound")]
            pairs = zip(found, (".1e", ".1e", ".3f"), strict=True)
            cells += ["none" if value is None else format(value, how) for value, how in pairs]
        cells.append(f"OVER: {', '.join(line['over'])}" if line["over"] else "")
        shown.append(f"| {' | '.join(cells)} |")
    return "\n".join(shown) + "\n"


def options(arguments: list[str] | None) -> argparse.Namespace:
    about = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    about.add_argument("--size", type=int, default=4096)
    about.add_argument("--rows", type=int, nargs="+", default=ROWS)
    about.add_argument("--storages", nargs="+", default=STORAGES)
    about.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    about.add_argument("--threads", type=int, default=1)
    about.add_argument("--rounds", type=int, default=5)
    about.add_argument("--out", type=Path, default=Path("build/bench"))
    about.add_argument("--quick", action="store_true", help="256 x 256, one run from caches")
    given = about.parse_args(arguments)
    if given.size % 256:
        about.error(f"--size must be a multiple of 256, got {given.size}")
    if given.quick:
        given.size, given.rounds = 256, 0
    return given


def main(arguments: list[str] | None = None, product: Call = F.linear) -> int:
    given = options(arguments)
    torch.set_num_threads(given.threads)
    lines = measured(given, product)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "accuracy.json").write_text(json.dumps(lines, indent=1) + "\n")
    (given.out / "accuracy.md").write_text(table(lines))
    over = [line for line in lines if line["over"]]
    print(table(over or lines), end="")
    print(f"{len(lines)} products, {len(over)} over the bound: {given.out / 'accuracy.md'}")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Products of few, of several and of many rows by resting weights, beside the dense one.

One matrix in each storage, all in turn in one process, medians; before each product 64 MiB of other
memory are written, so that weights come from where they rest. One thread is timed by what it has of
the processor, which other programs change less. `read` is the time in which the bytes at rest are
read once, by a sum over 256 MiB. An instruction set is forced by STOWAGE_FORCE_ISA.
Run: python bench/python/few_rows.py [--size 4096] [--rows 1 4 16] [--storages nf4 mxfp4]
     [--dtype bf16] [--gradient] [--threads 1] [--rounds 7] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

import stowage

STORAGES = ["f8_e4m3:row", "f8_e4m3:block128x128", "int8:row", "nf4", "int4:block32:bf16"]
STORAGES += ["mxfp4", "nvfp4", "q4_k"]
ROWS = [1, 2, 4, 8, 16, 32, 48, 128]
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "fp32": torch.float32}


def seconds(call: Callable[[], object]) -> float:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    call()
    return clock() - start


def read_rate(rounds: int) -> float:
    """Bytes a second."""
    much = torch.ones(1 << 25, dtype=torch.int64)
    return much.nbytes / min(seconds(much.sum) for _ in range(rounds))


@torch.inference_mode()
def products(
    weights: dict[str, Tensor], m: int, rounds: int, gradient: bool = False
) -> dict[str, float]:
    """Median milliseconds of each, after a round that does not count; `gradient`: that of x."""
    other = torch.ones(1 << 26, dtype=torch.uint8)
    one = next(iter(weights.values()))  # all are square
    x = torch.randn(m, one.shape[1], dtype=torch.float32).to(one.dtype)
    product = torch.matmul if gradient else F.linear
    times: dict[str, list[float]] = {name: [] for name in weights}
    for turn in range(rounds + 1):
        for name, weight in weights.items():
            other.add_(1)
            took = seconds(lambda weight=weight: product(x, weight))
            if turn:
                times[name].append(took)
    return {name: statistics.median(found) * 1e3 for name, found in times.items()}


def measured(options: argparse.Namespace) -> list[dict[str, object]]:
    dense = torch.randn(options.size, options.size).mul_(0.02).to(DTYPES[options.dtype])
    weights = {f"dense {options.dtype}": dense}
    weights.update({name: stowage.quantize(dense, name) for name in options.storages})
    rate, lines = read_rate(options.rounds), []
    for m in options.rows:
        for name, ms in products(weights, m, options.rounds, options.gradient).items():
            held = getattr(weights[name], "nbytes_at_rest", dense.nbytes)
            line = {"rows": m, "storage": name, "ms": ms, "read": held / rate * 1e3}
            lines.append(line)
    return lines


def table(lines: list[dict[str, object]]) -> str:
    names = list(dict.fromkeys(str(line["storage"]) for line in lines))
    shown = [f"{'rows':>4s} " + " ".join(f"{name[:20]:>20s}" for name in names)]
    rest = {line["storage"]: line["read"] for line in lines}
    shown.append(f"{'read':>4s} " + " ".join(f"{rest[name]:20.2f}" for name in names))
    for m in dict.fromkeys(line["rows"] for line in lines):
        ms = {line["storage"]: line["ms"] for line in lines if line["rows"] == m}
        shown.append(f"{m:4d} " + " ".join(f"{ms[name]:20.2f}" for name in names))
    return "\n".join(shown)


def main() -> None:
    about = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    about.add_argument("--size", type=int, default=4096)
    about.add_argument("--rows", type=int, nargs="+", default=ROWS)
    about.add_argument("--storages", nargs="+", default=STORAGES)
    about.add_argument("--dtype", choices=list(DTYPES), default="bf16", help="of x and of values")
    about.add_argument("--gradient", action="store_true", help="x times the weight, not turned")
    about.add_argument("--threads", type=int, default=1)
    about.add_argument("--rounds", type=int, default=7)
    about.add_argument("--json", action="store_true")
    options = about.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    lines = measured(options)
    print(json.dumps(lines) if options.json else table(lines))


if __name__ == "__main__":
    main()

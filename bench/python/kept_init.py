# SPDX-License-Identifier: Apache-2.0
"""Peak of memory while a model is made that rests from the start, four ways, beside the formulas;
and the time of from_masters for many weights.

    none, spilled             rest + one weight's value + one weight's rest
    in memory, master first   rest + all values + one weight's rest

An init makes codes anew before they replace those that are there: hence one weight's rest. Bytes of
torch's CPU allocator, event by event (peaks.py). `then` is what is held afterwards, `end` after the
values have ended, or after MasterOptimizer has adopted the masters. Times are the best of several
runs. Run:
python bench/python/kept_init.py [--json] [--width 1024] [--layers 16] [--weights 500]
"""

import argparse
import json
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from peaks import peak_of
from torch import nn

import stowage
from stowage.training import MasterOptimizer, clear_init_value, from_masters, quantized_init

WAYS = ("none", "in memory", "spilled", "master first")


class Stack(nn.Module):
    """Square layers, each taken by its parent as soon as it is made."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        for i in range(layers):
            setattr(self, f"layer{i}", nn.Linear(width, width, bias=False))


@dataclass(frozen=True)
class Row:
    way: str
    peak: int
    formula: int
    then: int
    then_formula: int
    end: int

    @property
    def apart(self) -> float:
        """How far the peak is from the formula, as a part of it."""
        return self.peak / self.formula - 1


def _options(way: str, folder: str) -> dict[str, Any]:
    if way == "none":
        return {}
    if way == "master first":
        return {"master_first": True}
    return {"preserve_init": True, **({"spill": folder} if way == "spilled" else {})}


def construction(way: str, storage: str, width: int, layers: int) -> Row:
    """Makes the model once unmeasured, since files and allocators have first times."""
    with tempfile.TemporaryDirectory() as folder:
        held: list[nn.Module] = []

        def make() -> None:
            with quantized_init(storage, **_options(way, folder)):
                held.append(Stack(width, layers))

        make()
        held.clear()
        seen = peak_of(make)
        rest = sum(stowage.nbytes(p) for p in held[0].parameters())
        one_rest, one = rest // layers, width * width * 4
        values = one * layers if way in ("in memory", "master first") else 0
        peak = rest + values + one_rest + (0 if values else one)
        end = peak_of(lambda: _end(held[0], way)).held
        return Row(way, seen.anywhere, peak, seen.held, rest + values, seen.held + end)


def _end(model: nn.Module, way: str) -> object:
    if way == "master first":
        return MasterOptimizer(torch.optim.SGD, model, lr=0.1)
    for p in model.parameters():
        clear_init_value(p)
    return None


def casting(count: int, width: int, storage: str, repeats: int = 5) -> dict[str, float]:
    """Milliseconds of from_masters for `count` weights, alone and in a group, with one reduction;
    and of stowage.quantize and copy_ of each, for comparison."""
    made = torch.Generator().manual_seed(0)
    masters = [torch.randn(width, width, generator=made) for _ in range(count)]
    weights = [stowage.quantize(master, storage) for master in masters]
    starts = [0] * count

    def separately() -> None:
        for weight, master in zip(weights, masters, strict=True):
            weight.copy_(stowage.quantize(master, storage))

    runs = {
        "from_masters": lambda: from_masters(weights, masters),
        "one by one": separately,
    }
    if dist.is_initialized():
        runs["in a group"] = lambda: from_masters(weights, masters, starts, dist.group.WORLD)
    found = {}
    for name, run in runs.items():
        run()
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        found[name] = min(times) * 1e3
    return found


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--json", action="store_true")
    for name, value in (("width", 1024), ("layers", 16), ("weights", 500)):
        asked.add_argument(f"--{name}", type=int, default=value)
    asked.add_argument("--storage", default="f8_e4m3:tensor")
    given = asked.parse_args()
    rows = [construction(way, given.storage, given.width, given.layers) for way in WAYS]
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    times = casting(given.weights, 256, given.storage)
    dist.destroy_process_group()
    if given.json:
        print(json.dumps({"construction": [asdict(row) for row in rows], "casting_ms": times}))
        return
    print("way            peak     formula  apart    then     formula  end      (MiB)")
    for row in rows:
        sizes = [n / 2**20 for n in (row.peak, row.formula, row.then, row.then_formula, row.end)]
        peak, formula, then, then_formula, end = (f"{size:<8.2f}" for size in sizes)
        print(f"{row.way:14} {peak} {formula} {row.apart:+.2%}   {then} {then_formula} {end}")
    for name, ms in times.items():
        print(f"{name}: {given.weights} weights of 256 x 256 in {ms:.1f} ms")


if __name__ == "__main__":
    main()

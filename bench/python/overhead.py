# SPDX-License-Identifier: Apache-2.0
"""What a stowed weight costs a small layer in Python: 200 layers of 16x16 bf16, one thread.

Prints microseconds per layer (the minimum of 25 interleaved rounds, taken for each tenth of the
layers since a whole pass outlasts a time slice of a busy machine) and, for each limit of the
project, the difference beside it. Run: python bench/python/overhead.py [--json]
"""

import argparse
import gc
import json
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

import stowage
from stowage._ops import library

LAYERS, SLICES, SIZE, ROUNDS = 200, 10, 16, 25
STORAGE = "f8_e4m3:row"

Call = Callable[[slice], None]  # runs some of the layers


def _per_layer(calls: dict[str, Call]) -> dict[str, float]:
    step = LAYERS // SLICES
    parts = [slice(i, i + step) for i in range(0, LAYERS, step)]
    best = {name: [float("inf")] * SLICES for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            for i, part in enumerate(parts):
                start = time.perf_counter()
                call(part)
                best[name][i] = min(best[name][i], time.perf_counter() - start)
    return {name: sum(seconds) / LAYERS * 1e6 for name, seconds in best.items()}


def _calls(x: torch.Tensor) -> dict[str, Call]:
    def layer(stow: bool) -> nn.Linear:
        made = nn.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        if stow:
            weight = stowage.quantize(made.weight.detach(), STORAGE)
            made.weight = nn.Parameter(weight, requires_grad=False)
        return made

    stock, stowed = ([layer(stow) for _ in range(LAYERS)] for stow in (False, True))
    operands = [
        library.quantize(made.weight.detach(), weight.weight._storage.key)
        for made, weight in zip(stock, stowed, strict=True)
    ]
    matrices = [(codes, [scale]) for codes, scale in operands]
    key = stowed[0].weight._storage.key

    def bare(part: slice) -> None:
        for codes, scales in matrices[part]:
            library.linear(x, codes, scales, key, SIZE, None)

    def function(weights: list[torch.Tensor]) -> Call:
        def call(part: slice) -> None:
            for weight in weights[part]:
                F.linear(x, weight)

        return call

    def module(layers: list[nn.Linear]) -> Call:
        def call(part: slice) -> None:
            for made in layers[part]:
                made(x)

        return call

    return {
        "bare op": bare,
        "F.linear plain": function([made.weight for made in stock]),
        "F.linear stowed": function([made.weight for made in stowed]),
        "nn.Linear stock": module(stock),
        "nn.Linear stowed": module(stowed),
    }


Row = tuple[str, float, float | None]


def measure() -> list[Row]:
    """Name, microseconds, limit."""
    x = torch.randn(1, SIZE, dtype=torch.bfloat16)
    with torch.inference_mode():
        quiet = _per_layer(_calls(x))
    calls = _calls(x.clone().requires_grad_())
    del calls["bare op"]  # alone it would go through register_autograd
    grad = _per_layer(calls)
    rows: list[Row] = [(f"{name}, inference_mode", value, None) for name, value in quiet.items()]
    rows += [(f"{name}, with gradients", value, None) for name, value in grad.items()]
    over_op = quiet["F.linear stowed"] - quiet["bare op"]
    over_stock = quiet["nn.Linear stowed"] - quiet["nn.Linear stock"]
    over_grad = grad["nn.Linear stowed"] - grad["nn.Linear stock"]
    rows.append(("F.linear stowed over the bare op", over_op, 2.5))
    rows.append(("nn.Linear stowed over stock", over_stock, 3.0))
    rows.append(("nn.Linear stowed over stock, with gradients", over_grad, 10.0))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print rows of {name, us, limit_us}")
    as_json = parser.parse_args().json
    torch.set_num_threads(1)
    gc.disable()
    rows = measure()
    if as_json:
        print(json.dumps([{"name": n, "us": v, "limit_us": limit} for n, v, limit in rows]))
        return
    print(f"{LAYERS} layers of {SIZE}x{SIZE} bf16, {STORAGE}, 1 thread, torch {torch.__version__}")
    for name, value, limit in rows:
        verdict = (
            ""
            if limit is None
            else "  limit {:4.1f}  {}".format(limit, "ok" if value <= limit else "OVER")
        )
        print(f"{name:46s} {value:7.2f} us{verdict}")


if __name__ == "__main__":
    main()

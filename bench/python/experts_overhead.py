# SPDX-License-Identifier: Apache-2.0
"""What a budget costs a token where nothing has to be read: a mixture in memory beside the same one
within a budget that holds all of it, one token at a time, interleaved, by the ways of transformers.
Run:
python bench/python/experts_overhead.py [--layers 8] [--experts 32] [--width 256] [--inner 128]
     [--storage int8:row2] [--ways grouped_mm batched_mm eager] [--rounds 12] [--threads 1] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from typing import Any

import torch
from experts import build, say

import stowage

TOKENS = 40  # of a round


def measured(options: argparse.Namespace, way: str) -> dict[str, Any]:
    """Microseconds of a token a layer: in memory, and within a budget."""
    models = []
    for _ in range(2):
        model = build(options)
        model.set_experts_implementation(way)
        stowage.stow(model, "int8", rules={"*.experts.*_proj": options.storage}, measure=False)
        models.append(model)
    with tempfile.TemporaryDirectory() as folder:
        ram = stowage.nbytes(models[1]) + (16 << 20)
        stowage.offload(models[1], ram=ram, folder=folder)
        taken: list[list[float]] = [[], []]
        every = torch.randint(4096, (options.rounds + 4, TOKENS)).tolist()
        for number, tokens in enumerate(every):
            for model, times in zip(models, taken, strict=True):
                token = statistics.median(say(model, tokens))
                times += [token] if number >= 4 else []  # before, experts are read
        stowage.onload(models[1])
    memory, within = (statistics.median(times) / options.layers * 1e6 for times in taken)
    return {"way": way, "memory": memory, "within": within, "more": within - memory}


def main() -> None:
    about = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    about.add_argument("--layers", type=int, default=8)
    about.add_argument("--experts", type=int, default=32)
    about.add_argument("--width", type=int, default=256)
    about.add_argument("--inner", type=int, default=128)
    about.add_argument("--storage", default="int8:row2")
    about.add_argument("--ways", nargs="+", default=["grouped_mm", "batched_mm", "eager"])
    about.add_argument("--rounds", type=int, default=12)
    about.add_argument("--threads", type=int, default=1)
    about.add_argument("--json", action="store_true")
    options = about.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    rows = [measured(options, way) for way in options.ways]
    for row in rows if not options.json else ():
        print(
            f"{row['way']}: {row['memory']:.0f} us a layer in memory, {row['within']:.0f} within a "
            f"budget, {row['more']:.0f} more"
        )
    if options.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Small models of many families in every storage, computing in bf16, beside fp32 and dense bf16.

For each: the share of the parameters that rest, bytes of all parameters beside bf16, the error of
the output beside fp32 (norm of the difference by the norm), and the processor time of a forward
beside dense bf16 (interleaved, the minimum of the rounds). The models are tiny, so
times show what a layer costs in Python; errors are those of random weights, which are harsher than
trained ones.
Run: python bench/python/models.py [--models unet llama] [--storages nf4 int8:row] [--json]
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import math
import time
from dataclasses import dataclass

import torch
from families import FAMILIES, STORAGES, Inputs, answer, relative
from torch import nn

import stowage

ROUNDS = 7


@dataclass(frozen=True)
class Row:
    model: str
    storage: str  # "dense": bf16 without stowage
    parameters: int
    share_stowed: float  # of the elements
    bytes: int  # of all parameters, as they rest
    bytes_beside_bf16: float
    error_beside_fp32: float
    time_beside_bf16: float


def _times(models: dict[str, nn.Module], batch: Inputs, rounds: int) -> dict[str, float]:
    best = dict.fromkeys(models, math.inf)
    for _ in range(rounds):
        for name, model in models.items():
            start = time.process_time()
            answer(model, batch)
            best[name] = min(best[name], time.process_time() - start)
    return best


def measure(family: str, storages: tuple[str, ...], rounds: int = ROUNDS) -> list[Row]:
    """One row for dense bf16, then one for each storage."""
    original = FAMILIES[family].build()
    models = {"dense": copy.deepcopy(original).to(torch.bfloat16)}
    elements = sum(p.numel() for p in original.parameters())
    facts = {"dense": (0.0, sum(p.nbytes for p in models["dense"].parameters()))}
    for storage in storages:
        models[storage] = copy.deepcopy(original)
        report = stowage.stow(models[storage], storage, compute_dtype=torch.bfloat16)
        stowed = sum(math.prod(row.shape) for row in report.stowed)
        facts[storage] = (stowed / elements, report.rest_bytes)
    with torch.inference_mode():
        wanted, batch = (
            answer(original, FAMILIES[family].batch()),
            FAMILIES[family].batch(torch.bfloat16),
        )
        errors = {name: relative(answer(model, batch), wanted) for name, model in models.items()}
        times = _times(models, batch, rounds)
    return [
        Row(
            family,
            name,
            elements,
            share,
            size,
            size / facts["dense"][1],
            errors[name],
            times[name] / times["dense"],
        )
        for name, (share, size) in facts.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--storages", nargs="+", default=list(STORAGES))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = [r for m in given.models for r in measure(m, tuple(given.storages), given.rounds)]
    if given.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows]))
        return
    facts = stowage.info()
    print(f"bf16, one thread, {facts['instruction_set']}, torch {facts['torch']}")
    print(
        f"{'model':11s}{'storage':20s}{'stowed':>6s}{'bytes':>9s}{'/bf16':>7s}"
        f"{'error':>8s}{'time':>6s}"
    )
    for row in rows:
        print(
            f"{row.model:11s}{row.storage:20s}{row.share_stowed:6.3f}{row.bytes:9d}"
            f"{row.bytes_beside_bf16:7.3f}{row.error_beside_fp32:8.4f}{row.time_beside_bf16:6.2f}"
        )


if __name__ == "__main__":
    main()

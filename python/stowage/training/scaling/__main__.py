# SPDX-License-Identifier: Apache-2.0
"""Prints the table: python -m stowage.training.scaling [--form nf4] [--ranks 8,4096] [--json]."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict
from typing import Any

import torch

from stowage._ops.errors import StowageError
from stowage._ops.storage import Storage
from stowage.training.recipes import RECIPES
from stowage.training.scaling import (
    PLAIN,
    Setting,
    decoder,
    elements,
    memory,
    shapes,
    width_of,
    wire,
)

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9}
_KEPT = ("gather", "work", "rest", "gradient", "optimizer", "peak")
_HEADS = ("weights", "ranks", "calls", "received", *_KEPT)


def _number(text: str) -> float:
    """400e9, 400b, 8B."""
    unit = text[-1:].lower() if text[-1:].isalpha() else ""
    try:
        value = float(text[: len(text) - len(unit)]) * _UNITS[unit]
    except (ValueError, KeyError):
        value = math.nan
    if not 1 <= value <= 1e12:
        raise argparse.ArgumentTypeError(
            f"must be a number from 1 to 1e12 such as 8e9 or 8b, got {text}"
        )
    return value


def _numbers(text: str) -> list[float]:
    return [_number(part) for part in text.split(",")]


def _whole(text: str) -> int:
    value = _number(text)
    if value != int(value):
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text}")
    return int(value)


def _wholes(text: str) -> list[int]:
    return [_whole(part) for part in text.split(",")]


def _zero_or_more(text: str) -> int:
    return 0 if text == "0" else _whole(text)


def _form(text: str) -> str:
    if text in (PLAIN, *RECIPES):
        return text
    try:
        storage = Storage(text)
    except StowageError as error:
        known = ", ".join((PLAIN, *RECIPES))
        raise argparse.ArgumentTypeError(f"must be {known} or a storage: {error}") from None
    if storage.scale_type == "of_values":
        raise argparse.ArgumentTypeError(f"must name the dtype of its parts, such as {text}:bf16")
    return storage.name


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m stowage.training.scaling", description=__doc__)
    add = parser.add_argument
    add("--form", type=_form, default="tensorwise", help="plain, a recipe, or a frozen storage")
    add("--weights", type=_numbers, default="1b,8b,70b,400b", help="of the models: 8b,400e9")
    add("--ranks", type=_wholes, default="8,64,512,4096")
    add("--shards", type=_whole, help="ranks of a shard mesh, where ranks hold copies (HSDP)")
    add("--rest", choices=_DTYPES, help="of trained weights: fp32; bf16 where a storage is frozen")
    add("--compute", choices=_DTYPES, default="bf16", help="param_dtype")
    add("--reduce", choices=_DTYPES, help="reduce_dtype: fp32; bf16 where a storage is frozen")
    add("--keep", action="store_true", help="reshard_after_forward=False")
    add("--micro-batches", type=_whole, default=1, help="each with a reduction")
    add("--states", type=int, choices=(0, 1, 2), default=2, help="of the optimizer: AdamW has 2")
    add("--vocabulary", type=_whole, default=128256)
    add(
        "--adapter", type=_zero_or_more, default=16, help="rank of adapters beside a frozen storage"
    )
    add("--json", action="store_true", help="bytes, one object for each row")
    return parser


def _check_model(width: int, weights: float, given: argparse.Namespace) -> None:
    """Whether there is a decoder of about so many weights, which can rest so."""
    nearest = elements(width, given.vocabulary)
    if abs(nearest - weights) > 0.25 * weights:
        raise ValueError(
            f"--weights must be near those of a decoder of {given.vocabulary} words, the nearest "
            f"has {nearest:.3g}, got {weights:.3g}; change --vocabulary"
        )
    if given.form not in (PLAIN, *RECIPES):
        for shape in shapes(width):
            if misfit := Storage(given.form).misfit(shape):
                raise ValueError(f"--form: {misfit}, got {list(shape)}")


def rows(given: argparse.Namespace) -> list[dict[str, Any]]:
    """One for each model and number of ranks. Raises ValueError."""
    frozen = given.form not in (PLAIN, *RECIPES)
    default = "bf16" if frozen else "fp32"
    found = []
    for weights in given.weights:
        width = width_of(weights, given.vocabulary)
        _check_model(width, weights, given)
        groups = decoder(width, given.vocabulary, given.form, given.adapter)
        for ranks in given.ranks:
            shards = given.shards or ranks
            if ranks % shards:
                raise ValueError(f"--ranks must be a multiple of --shards {shards}, got {ranks}")
            setting = Setting(
                shards,
                ranks // shards,
                _DTYPES[given.rest or default],
                _DTYPES[given.compute],
                _DTYPES[given.reduce or default],
                not given.keep,
                given.micro_batches,
                given.states,
            )
            sent = wire(groups, setting)
            facts: dict[str, Any] = {"weights": elements(width, given.vocabulary), "ranks": ranks}
            facts |= {"form": given.form, "width": width, "collectives": sent.collectives}
            facts |= {"received": sent.received, "wire": asdict(sent)}
            found.append(facts | {"memory": asdict(memory(groups, setting))})
    return found


def _size(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return (
                f"{count / size:.3g} {unit}" if count < 999 * size else f"{count / size:.0f} {unit}"
            )
    return f"{count} B"


def table(found: list[dict[str, Any]]) -> str:
    """Bytes of one rank; what it receives, and calls, in a step."""
    lines = [" | ".join(f"{head:>9}" for head in _HEADS)]
    for row in found:
        kept = row["memory"]
        cells = [f"{row['weights'] / 1e9:.3g} b", str(row["ranks"]), str(row["collectives"])]
        cells.append(_size(row["received"]))
        cells += [_size(kept[name]) for name in _KEPT]
        lines.append(" | ".join(f"{cell:>9}" for cell in cells))
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        found = rows(given)
    except ValueError as error:
        parser.error(str(error))
    print(json.dumps(found, indent=1) if given.json else table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())

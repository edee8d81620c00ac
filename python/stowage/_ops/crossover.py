# SPDX-License-Identifier: Apache-2.0
"""From how many rows of x on another way to multiply is quicker on this machine."""

import json

from stowage._ops import library
from stowage._ops.errors import translated


def crossover(*, anew: bool = False) -> dict[str, int]:
    """The most rows of x that each way to multiply is taken for.

    In force is what this package was built with, until it is measured: by `anew`, or by
    `stowage bench --crossover`. That is kept beside the rates of plans (docs/env.md), and in force
    in each process that begins later. STOWAGE_CROSSOVER says otherwise. Ways differ in the last
    bits of their results, within the bounds of docs/numbers.md.

    Args:
        anew: measures now, in about a second, on torch's threads, and keeps that.

    Returns:
        Ways to rows of x; 0: never, 2^30: any number. "rows", "long_groups", "short_groups",
        "bytes", "words" and "float8" are ways of our own, from "own" on it is how many rows of
        fp32 and f16, and of bf16 by all storages, by those that are multiplied in pairs, and by
        nf4 and fp4, are not left to torch's product of dequantized tiles.

    Raises:
        FileError: it cannot be kept; what was measured is in force in this process alone.

    Example:
        >>> stowage.crossover()["rows"] >= 1
        True
    """
    try:
        return dict(
            json.loads(
                library.text(library.crossover_measure() if anew else library.crossover_now())
            )
        )
    except RuntimeError as error:
        raise translated(error) from None


def use_kept() -> None:
    """Puts in force what was measured here once, for kernels that are used. Raises InvalidArgument
    for a STOWAGE_CROSSOVER that says nothing."""
    if library.composite_forced():
        return
    try:
        library.crossover_use_kept()
    except RuntimeError as error:
        raise translated(error) from None


use_kept()

# SPDX-License-Identifier: Apache-2.0
"""Decoders of any number of weights, in the proportions that open ones of 8 to 400 billion share.

Width h a multiple of 128, h / 128 blocks; keys and values a quarter of the heads; feed-forward
3.5 h wide with a gate: 13 h^2 weights in the linear layers of a block. Embedding and head apart.
"""

from __future__ import annotations

from stowage.training.recipes import RECIPES
from stowage.training.scaling.groups import PLAIN, Group, Weight

_STEP = 128
_MOST = 1 << 10  # steps: 131,072 wide


def shapes(width: int) -> list[tuple[int, int]]:
    """Rows and columns of the linear layers of a block."""
    inner = width * 7 // 2
    attention = [(width, width), (width // 4, width), (width // 4, width), (width, width)]
    return [*attention, (inner, width), (inner, width), (width, inner)]


def elements(width: int, vocabulary: int) -> int:
    """Weights of the whole decoder, norms too."""
    block = sum(rows * columns for rows, columns in shapes(width)) + 2 * width
    return width // _STEP * block + 2 * vocabulary * width + width


def width_of(weights: float, vocabulary: int) -> int:
    """That of the decoder whose number of weights is nearest."""
    widths = range(_STEP, _STEP * _MOST + 1, _STEP)
    return min(widths, key=lambda width: abs(elements(width, vocabulary) - weights))


def decoder(width: int, vocabulary: int, form: str, adapter: int) -> list[Group]:
    """Its groups: embedding, each block, and the last norm with the head.

    `form` is that of the linear layers of blocks. A storage freezes all weights but low-rank
    adapters of `adapter` columns on each of these; else everything trains."""
    frozen = form != PLAIN and form not in RECIPES
    trained = not frozen
    linear = [Weight(rows, columns, form, trained) for rows, columns in shapes(width)]
    pairs = [
        Weight(*shape)
        for rows, columns in shapes(width)
        for shape in ((adapter, columns), (rows, adapter))
        if frozen and adapter
    ]
    norms = [Weight(width, 1, PLAIN, trained)] * 2
    block = Group((*linear, *pairs, *norms))
    table = Weight(vocabulary, width, PLAIN, trained)
    last = Group((Weight(width, 1, PLAIN, trained), table))
    return [Group((table,)), *[block] * (width // _STEP), last]

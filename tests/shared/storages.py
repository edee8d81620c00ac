# SPDX-License-Identifier: Apache-2.0
"""The storages that tests walk, chosen by what is to be covered among all that the parser lists, so
that a format that the table gets is in all of them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Hashable, Iterable
from functools import cache

from stowage._ops.errors import InvalidArgument
from stowage._ops.storage import Storage

_SCALINGS = ("", ":none", ":tensor", ":row", ":row2", ":block32", ":block6", ":block5", ":block48")
_SCALINGS += (":block64", ":block128", ":block4x8", ":block4x32", ":block16", ":block4096")
_SCALINGS += (":column2", ":column4")
_TYPES = ("", ":bf16", ":f16", ":e8m0", ":e4m3", ":f32", ":f64", ":e4m3_bf16", ":e4m3_quotient")
_TYPES += (":absmax",)
_EXTRAS = ("", ":zero", ":nested", ":zero_sum", ":zero_rounded", ":row", ":row2")
_TORCHAO = (":torchao:block16", ":torchao:block32")
_SCALERS = (":scaler1", ":scaler2", ":scaler4")


def _parsed(text: str) -> Storage | None:
    try:
        return Storage(text)
    except InvalidArgument:
        return None


@cache
def named() -> tuple[str, ...]:
    """What the error for a typo lists: each format, then what has a name of its own."""
    try:
        Storage("no format")
    except InvalidArgument as error:
        listed = str(error).split("must be one of ")[1].split(" (N:")[0]
        return tuple(dict.fromkeys(re.findall(r"(?:^|, )(\w+)", listed)))
    raise AssertionError("a typo must be refused")


def formats() -> list[str]:
    """Those of the table."""
    return [name for name in named() if Storage(name).codes == name]


@cache
def legal() -> tuple[Storage, ...]:
    """Storages of every format, with groups of a few sizes, every type and option."""
    texts = [*named()]
    texts += map("".join, itertools.product(named(), _SCALINGS, _TYPES, _EXTRAS))
    texts += map("".join, itertools.product(named(), _TORCHAO, _SCALERS, _TYPES))
    found = dict.fromkeys(filter(None, map(_parsed, texts)))
    return tuple(s for s in found if s.scale_type != "of_values")


def covering(
    features: Callable[[Storage], Iterable[Hashable]],
    within: Callable[[Storage], bool] = lambda storage: True,
) -> list[str]:
    """Storages that have between them every feature that any has, next to as few as can be: always
    the first of those that add most.

    Args:
        features: What of a storage is to be covered.
        within: Which storages are asked for; of nf4:torchao, those that name a dtype.
    """
    left = {str(storage): set(features(storage)) for storage in legal() if within(storage)}
    chosen = []
    while left:
        best = max(left, key=lambda name: len(left[name]))
        covered = left.pop(best)
        if not covered:
            break
        chosen.append(best)
        for others in left.values():
            others -= covered
    return chosen


def flat_shapes(storage: Storage) -> bool:
    """Whether it has every shape of at least two dimensions with an even number of columns."""
    needs_three = storage.kind == "row2" and storage.packing == "low_first"
    needs_three |= storage.outer_kind == "row2"
    return (
        storage.dialect == "standard"
        and storage.kind not in ("block2", "column")
        and storage.together <= 2
        and not needs_three
    )


def of_parts(storage: Storage) -> bool:
    """Of those, what may be quantized where its rows lie, in several processes."""
    return flat_shapes(storage) and not (storage.zero and storage.kind == "tensor")


def codec(storage: Storage) -> list[Hashable]:
    """What arithmetic on codes treats apart: kinds of groups, zeros and nested scales of each
    format; types of scales, and rows that end inside of a group, of each packing."""
    name = storage.codes, storage.dialect
    return [
        (name, storage.kind),
        (name, storage.zero, storage.nested, storage.scale_code),
        (name, storage.outer_kind),
        (storage.packing, storage.codec, storage.scale_type),
        (storage.packing, storage.codec, bool(storage.block % 32)),
    ]


def form(storage: Storage) -> list[Hashable]:
    """What lies where, of whatever format: for tests that cost seconds."""
    return [
        (storage.packing, storage.codec == "cast", storage.scale_code, storage.zero),
        (storage.packing, storage.holds_values, storage.kind),
        (storage.packing, storage.outer_kind),
    ]


def form_of_each(storage: Storage) -> list[Hashable]:
    """The same, and every format."""
    return [*form(storage), storage.codes]

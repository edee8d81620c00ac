# SPDX-License-Identifier: Apache-2.0
"""Parts of a weight, quantized apart with the maxima of all, are the bytes of the whole."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from storages import covering, form_of_each, of_parts
from torch import Tensor

import stowage
from stowage._ops.numbers.stochastic import quantize as round_stochastically
from stowage._ops.storage import Storage
from stowage._shard import fragments
from stowage._shard.fragments import Fragment, amaxes, row_parts, rows_fragment, whole_parts
from stowage._shard.records import encode

STORAGES = covering(
    form_of_each,
    lambda storage: of_parts(storage) and not (storage.zero or storage.record),
)
SHAPES = [(7, 33), (5, 64), (6, 3, 32)]


def values_of(shape: tuple[int, ...]) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(shape) * torch.logspace(-3, 2, shape[-1])


def parts_of(values: Tensor, storage: Storage, key: int | None) -> list[Tensor]:
    if key is not None:
        return round_stochastically(values, storage, key)
    return list(stowage.quantize(values, storage).parts.values())


@pytest.mark.parametrize("key", [None, 5])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", STORAGES)
def test_rows(
    name: str, shape: tuple[int, ...], key: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fragments, "_PIECE", 2 * math.prod(shape[1:]))  # several pieces
    storage, values = Storage(name), values_of(shape)
    if ("row2" in name and len(shape) < 3) or storage.misfit(shape):
        return
    want = parts_of(values, storage, key)
    cuts = [0, 3, 3, shape[0]]  # the second process has none
    mine = [
        rows_fragment(storage, shape, first, values[first:last])
        for first, last in itertools.pairwise(cuts)
    ]
    largest = torch.stack([amaxes(fragment) for fragment in mine]).amax(0)
    for fragment, first, last in zip(mine, cuts, cuts[1:], strict=False):
        records, shared = row_parts(fragment, largest, key)
        assert torch.equal(records, encode(want, storage, shape, first, last))
        for a, b in zip(shared, want[len(want) - len(shared) :], strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", STORAGES)
def test_flat_parts(name: str, shape: tuple[int, ...]) -> None:
    storage, values = Storage(name), values_of(shape)
    if ("row2" in name and len(shape) < 3) or storage.misfit(shape):
        return
    codes, *scales = parts_of(values, storage, None)
    byte = max(storage.together, 2)
    cuts = [0, byte, 128 + byte, 128 + byte, values.numel()]
    mine = [
        Fragment(storage, shape, first, values.view(-1)[first:last])
        for first, last in itertools.pairwise(cuts)
    ]
    largest = torch.stack([amaxes(fragment) for fragment in mine]).amax(0)
    of, each = storage.bytes_of, storage.together
    for fragment in mine:
        got, *others = whole_parts(fragment, largest)
        assert all(torch.equal(a, b) for a, b in zip(others, scales, strict=True))
        span = slice(of(fragment.start), of(-(-fragment.stop // each) * each))
        a, b = got.view(-1)[span], codes.view(-1)[span]
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("name", ["q4_k", "q6_k"])
def test_parts_of_rows_are_not_quantized_to_records(name: str) -> None:
    values = torch.ones(300)
    fragment = Fragment(Storage(name), (2, 512), 100, values)
    with pytest.raises(stowage.Unsupported, match="records depend on all values of a superblock"):
        amaxes(fragment)

# SPDX-License-Identifier: Apache-2.0
"""e4m3 scales under a number for each row, or pair of indices, instead of one for all: where all
these are alike, every product is that of the other storage, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import stowage
from stowage._ops import composite, library
from stowage._ops.storage import Storage
from stowage._tensor.stowed import StowedTensor

TYPES = ["f4_e2m1:block16:e4m3", "f4_e2m1:block16:e4m3_bf16", "f4_e2m1:block16:e4m3_quotient"]


def values(*shape: int) -> Tensor:
    """Rows of many magnitudes."""
    random = torch.Generator().manual_seed(3)
    powers = torch.randint(-9, 9, (*shape[:-1], 1), generator=random)
    return torch.randn(shape, generator=random) * 2.0**powers


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize("name", TYPES)
def test_each_number_is_that_of_its_values_alone(name: str) -> None:
    given = values(3, 4, 96)
    for behind, alone in (("row", given), ("row2", given.view(12, 96))):
        storage = Storage(f"{name}:{behind}")
        for quantize in (library.quantize, composite.quantize):
            codes, scale, outer = quantize(given, storage.key)
            parts = [quantize(one, Storage(name).key) for one in alone.view(len(alone), -1, 96)]
            assert torch.equal(codes.flatten(), torch.cat([p[0].flatten() for p in parts]))
            assert torch.equal(scale.flatten(), torch.cat([p[1].flatten() for p in parts]))
            assert torch.equal(outer.flatten(), torch.stack([p[2] for p in parts]))
            assert len(outer.unique()) > 1


@pytest.mark.parametrize("m", [1, 3, 40])
@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", TYPES)
def test_products_are_those_of_one_number(name: str, compute: torch.dtype, m: int) -> None:
    of_all, rows = Storage(name), Storage(f"{name}:row")
    given = torch.randn(70, 256, generator=torch.Generator().manual_seed(1))
    codes, scale, outer = library.quantize(given, of_all.key)
    each = outer.expand(70, 1).contiguous()
    x = torch.randn(m, 256, generator=torch.Generator().manual_seed(2)).to(compute)
    g = torch.randn(m, 70, generator=torch.Generator().manual_seed(4)).to(compute)
    ids = torch.tensor([69, 0, 3])
    found = [
        (
            ops.linear(x, codes, [scale, over], kind.key, 70, None),
            ops.linear_grad_input(g, codes, [scale, over], kind.key, 256),
            ops.dequantize(codes, [scale, over], kind.key, [70, 256], compute),
            ops.embedding(ids, codes, [scale, over], kind.key, [70, 256], compute),
        )
        for ops in (library, composite)
        for kind, over in ((of_all, outer), (rows, each))
    ]
    for one, other in (found[:2], found[2:]):
        assert all(map(same, one, other))


def test_an_index_has_its_number_and_stacks_have_those_of_their_pieces() -> None:
    for name, one in (("nvfp4:row2", "nvfp4:row"), ("nvfp4:row", "nvfp4")):
        w = stowage.quantize(values(4, 6, 64), name)
        dense, expert = w.dequantize(), w[1]
        assert isinstance(expert, StowedTensor) and expert.resting == one
        assert torch.equal(expert.dequantize(), dense[1])
        both = torch.stack([w[0], w[3]])
        assert isinstance(both, StowedTensor) and both.resting == name
        assert torch.equal(both.dequantize(), dense[[0, 3]])
        assert torch.equal(torch.cat([w[:2], w[2:]]).dequantize(), dense)
    w = stowage.quantize(values(2, 2, 16), "nvfp4:row2")
    assert not isinstance(torch.stack([w, w]), StowedTensor)


@pytest.mark.parametrize("name", TYPES)
def test_a_write_to_a_part_of_a_row_keeps_its_number_where_it_can(name: str) -> None:
    w = stowage.quantize(values(6, 64), f"{name}:row")
    dense, outer = w.dequantize(), w.parts["global_scale"].clone()
    others = [0, 1, 3, 4, 5]
    w[2, :16] = dense[2, :16] * 0.25  # a power of two, which the scales follow
    assert torch.equal(w.parts["global_scale"], outer)
    assert torch.equal(w.dequantize()[2, :16], dense[2, :16] * 0.25)
    assert torch.equal(w.dequantize()[2, 16:], dense[2, 16:])
    big = float(dense[2].abs().max()) * 100
    w[2, 0] = big
    after = w.dequantize()
    assert float(after[2, 0]) == pytest.approx(big, rel=0.01)
    assert torch.equal(after[others], dense[others])
    assert torch.equal(w.parts["global_scale"][others], outer[others])
    row = values(7, 64)[6]
    w[2] = row
    fresh = stowage.quantize(row[None], f"{name}:row")
    assert torch.equal(w.dequantize()[2:3], fresh.dequantize())
    assert torch.equal(w.parts["global_scale"][2:3], fresh.parts["global_scale"])
    assert torch.equal(w.dequantize()[others], dense[others])


@pytest.mark.parametrize("shape", [(2, 3, 24), (4, 48)])
def test_pairs_of_indices_have_whole_groups(shape: tuple[int, ...]) -> None:
    with pytest.raises(stowage.InvalidArgument, match="at least 3 dimensions, and for each pair"):
        stowage.quantize(torch.randn(shape), "nvfp4:row2")

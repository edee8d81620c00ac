# SPDX-License-Identifier: Apache-2.0
"""Groups of one column (`:column<N>`): the rule in plain words, kernels beside the composite, and
what such a weight does as a tensor. Files: tests/python/files/test_dialects.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_life import saved_copied_and_trained_through
from torch import nn

import stowage
from stowage._files.row_cuts import RowCut
from stowage._ops import composite, library
from stowage._ops.numbers import stochastic
from stowage._ops.numbers.packing import unpack
from stowage._ops.storage import Storage
from stowage._shard.fragments import Fragment, amaxes
from stowage._shard.pieces import columns_misfit, rows_misfit
from stowage._shard.records import decode, encode
from stowage._tensor.stowed import StowedTensor

STORAGES = [
    "uint4:column2:zero_rounded",
    "uint4:column4:f16:zero_rounded",
    "uint4:column6:bf16:zero_rounded",
    "uint4:column24:bf16:zero_rounded",
]
SHAPE = ROWS, COLUMNS = 24, 70


def values(seed: int = 0, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    """Values that are not as far below 0 as above it; one column has none below, one is zeros."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 0.4
    if x.numel():
        x[:, 1].abs_()
        x[:, 2] = 0
    return x


def parts_of(weight: StowedTensor) -> list[torch.Tensor]:
    return [part.clone() for part in weight.parts.values()]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, left, right))


def block(name: str) -> str:
    """The storage of the same groups, each in a row of its own."""
    return name.replace("column", "block")


def groups(x: torch.Tensor, storage: Storage) -> torch.Tensor:
    """Of each group a row: [groups, elements of one]."""
    return x.reshape(storage.block, -1).t().contiguous()


@pytest.mark.parametrize("name", STORAGES)
def test_a_group_is_what_a_row_of_its_elements_is(name: str) -> None:
    storage, x = Storage(name), values()
    weight, rows = stowage.quantize(x, name), stowage.quantize(groups(x, storage), block(name))
    for part in ("scale", "zero"):
        got, want = weight.parts[part], rows.parts[part]
        assert got.shape == (ROWS // storage.block, COLUMNS) and got.dtype == want.dtype
        assert torch.equal(got.reshape(-1), want.reshape(-1))
    codes = unpack(weight.parts["codes"], "low_first")
    assert torch.equal(groups(codes, storage), unpack(rows.parts["codes"], "low_first"))
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert torch.equal(groups(weight.dequantize(dtype), storage), rows.dequantize(dtype))


@pytest.mark.parametrize("name", STORAGES)
@pytest.mark.parametrize("shape", [SHAPE, (48, 258), (0, 6), (24, 0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_stock_torch_makes_and_reads_the_same_bytes(
    name: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    storage, x = Storage(name), values(shape=shape).to(dtype)
    made, other = library.quantize(x, storage.key), composite.quantize(x, storage.key)
    assert same(made, other)
    assert [tuple(part.shape) for part in made] == [s for _, _, s in storage.layout(shape)]
    ids = torch.tensor([3, 0, 11, 3] if shape[0] else [], dtype=torch.int64)
    for out in (torch.float32, torch.bfloat16):
        args = (made[0], made[1:], storage.key, list(shape), out)
        assert torch.equal(library.dequantize(*args), composite.dequantize(*args))
        picked = [ops.embedding(ids, *args) for ops in (library, composite)]
        assert torch.equal(*picked)
    if x.numel():
        one, two = (ops.measure(x, made[0], made[1:], storage.key) for ops in (library, composite))
        torch.testing.assert_close(one, two, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", STORAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_are_those_of_the_values(name: str, dtype: torch.dtype) -> None:
    weight = stowage.quantize(values().to(dtype), name)
    dense = weight.dequantize()
    for rows in (1, 5, 40):
        x = torch.randn(rows, COLUMNS, dtype=dtype, requires_grad=True)
        y, want = nn.functional.linear(x, weight), nn.functional.linear(x, dense)
        bound = (torch.finfo(dtype).eps + 2**-16) * (x.abs() @ dense.abs().T)
        assert bool(((y - want).abs() <= 2 * bound).all())
        g = torch.randn_like(y)
        (got,) = torch.autograd.grad(y, x, g)
        bound = (torch.finfo(dtype).eps + 2**-16) * (g.abs() @ dense.abs())
        assert bool(((got - g @ dense).abs() <= 2 * bound).all())
    ids = torch.tensor([3, 0, 23])
    assert torch.equal(nn.functional.embedding(ids, weight), dense[ids])


@pytest.mark.parametrize("name", STORAGES)
def test_rows_alone_are_no_weight(name: str) -> None:
    """Their groups have other rows: slices, pieces and what is joined have values."""
    weight = stowage.quantize(values(), name)
    dense = weight.dequantize()
    whole = weight[:]
    assert isinstance(whole, StowedTensor) and torch.equal(whole.dequantize(), dense)
    for rows in (weight[3:9], weight[: ROWS // 2], weight[5]):
        assert type(rows) is not StowedTensor and torch.equal(rows + 0, dense[rows_at(rows, dense)])
    assert torch.equal(weight.t() + 0, dense.t())
    assert torch.equal(torch.randn(3, ROWS) @ weight * 0, torch.zeros(3, COLUMNS))
    for joined in (torch.cat([weight, weight]), torch.stack([weight, weight])):
        assert type(joined) is torch.Tensor and torch.equal(joined.view(-1, *SHAPE)[1], dense)
    for piece in weight.split(ROWS // 2):
        assert torch.equal(piece + 0, dense[rows_at(piece, dense)])
    cut = RowCut("w", SHAPE, ((0, 12),))
    assert "groups of columns have rows outside of rows 0 to 12" in cut.problem(Storage(name))


def rows_at(piece: torch.Tensor, dense: torch.Tensor) -> slice | int:
    """Which rows of the weight a view of it has."""
    first = piece.storage_offset() // COLUMNS
    return slice(first, first + piece.shape[0]) if piece.dim() == 2 else first


@pytest.mark.parametrize("name", STORAGES)
def test_a_write_quantizes_the_groups_that_it_touches(name: str) -> None:
    storage, weight = Storage(name), stowage.quantize(values(), name)
    apart = ROWS // storage.block
    with torch.no_grad():
        weight.copy_(values(1))
    assert same(parts_of(weight), parts_of(stowage.quantize(values(1), name)))
    was, before = weight.dequantize(), parts_of(weight)
    with torch.no_grad():
        weight.mul_(1)  # no value changes
    assert same(parts_of(weight), before)
    with torch.no_grad():
        weight[5, 10:21] = 0.25
        weight[ROWS - 1, 33] = 5.0
    touched = torch.zeros(SHAPE, dtype=torch.bool)
    touched[5 % apart :: apart, 10:21] = True
    touched[(ROWS - 1) % apart :: apart, 33] = True
    now = weight.dequantize()
    assert torch.equal(now[~touched], was[~touched])
    step = weight.parts["scale"].float().repeat(storage.block, 1)
    assert bool(((now - was).abs() <= 1.01 * step)[touched & (was != 5.0)].sum() > 0)
    assert abs(float(now[ROWS - 1, 33]) - 5.0) <= 0.6 * float(step[ROWS - 1, 33])
    assert bool(((now[5, 10:21] - 0.25).abs() <= 0.6 * step[5, 10:21]).all())
    for part, old in zip(("scale", "zero"), before[1:], strict=True):
        assert torch.equal(weight.parts[part][~touched[:apart]], old[~touched[:apart]])


def test_groups_that_a_write_does_not_touch_keep_what_another_made() -> None:
    """Its owner moves zeros after the rule, so that quantizing what was read makes others."""
    weight = stowage.quantize(values(), "uint4:column4:bf16:zero_rounded")
    with torch.no_grad():
        weight.parts["scale"].mul_(1.7)
        weight.parts["zero"].add_(0.31)
    before = parts_of(weight)
    with torch.no_grad():
        weight[7, 20] = 9.0
    after = parts_of(weight)
    other = torch.ones(6, COLUMNS, dtype=torch.bool)
    other[1, 20] = False
    assert torch.equal(after[1][other], before[1][other])
    assert torch.equal(after[2][other], before[2][other])
    codes, old = (unpack(parts[0], "low_first") for parts in (after, before))
    assert torch.equal(codes[other.repeat(4, 1)], old[other.repeat(4, 1)])
    assert not torch.equal(after[1], before[1])


@pytest.mark.parametrize("name", STORAGES)
def test_rounding_at_random_takes_a_neighbour(name: str) -> None:
    x, storage = values(), Storage(name)
    parts, nearest = stochastic.quantize(x, storage, 7), library.quantize(x, storage.key)
    assert same(parts[1:], nearest[1:])
    one, two = (unpack(p[0], "low_first").int() for p in (parts, nearest))
    assert int((one - two).count_nonzero()) > 0 and int((one - two).abs().max()) == 1


@pytest.mark.parametrize("name", ["uint4:column8:bf16:zero_rounded", "uint4:column4:zero_rounded"])
def test_a_model_is_saved_copied_and_trained_through(name: str, tmp_path: Path) -> None:
    saved_copied_and_trained_through(name, tmp_path / "model")


def test_a_model_is_fetched_from_a_disk(tmp_path: Path) -> None:
    name, x = "uint4:column8:bf16:zero_rounded", torch.randn(3, 64)
    model = nn.Sequential(nn.Linear(64, 48, bias=False), nn.Linear(48, 64, bias=False))
    stowage.stow(model, name)
    want = model(x)
    stowage.save(model, tmp_path / "saved")
    again = nn.Sequential(nn.Linear(64, 48, bias=False), nn.Linear(48, 64, bias=False))
    stowage.load(again, tmp_path / "saved", ram="64KiB")
    assert torch.equal(again(x), want)
    stowage.offload(model, ram="64KiB", folder=tmp_path / "offloaded")
    assert torch.equal(model(x), want)


def test_a_layer_rests_from_the_start() -> None:
    name = "uint4:column6:bf16:zero_rounded"
    torch.manual_seed(3)
    plain = nn.Linear(34, 48)
    torch.manual_seed(3)
    layer = stowage.frozen_linear(34, 48, name)
    assert same(parts_of(layer.weight), parts_of(stowage.quantize(plain.weight, name)))
    assert torch.equal(layer.bias, plain.bias)


def test_rows_travel_with_the_scales_of_all() -> None:
    name, shape = "uint4:column6:bf16:zero_rounded", (24, 70)
    storage = Storage(name)
    parts = library.quantize(values(), storage.key)
    back = [torch.zeros_like(parts[0]), *parts[1:]]
    for first, last in ((0, 5), (5, 24)):
        records = encode(parts, storage, shape, first, last)
        assert records.shape == (last - first, 35)  # codes alone
        decode(records, storage, shape, back[:1], first)
    assert same(back, list(parts))
    assert rows_misfit(storage, shape, 0, 24) is None
    assert rows_misfit(storage, shape, 0, 12) == "groups of its columns have rows all over it"
    rule = columns_misfit(storage, shape, 2)
    assert rule is not None and "use Shard(0)" in rule
    fragment = Fragment(storage, shape, 0, torch.ones(12 * 70), by_rows=True)
    rule = f"a part of a weight cannot rest as {name}, whose groups have rows of others"
    assert not fragment.stands_alone
    with pytest.raises(stowage.Unsupported, match=rule):
        amaxes(fragment)


@pytest.mark.parametrize("shape", [(64,), (20, 8), (8, 2, 4), (8, 8, 2, 2)])
def test_what_columns_do_not_fill_is_refused(shape: tuple[int, ...]) -> None:
    rule = "must have 2 dimensions, the first a multiple of 8, got"
    name = "uint4:column8:bf16:zero_rounded"
    with pytest.raises(stowage.InvalidArgument, match=rule):
        stowage.quantize(torch.randn(shape), name)
    with pytest.raises(RuntimeError, match=rule):
        library.quantize(torch.randn(shape, device="meta"), Storage(name).key)
    with pytest.raises(RuntimeError, match=rule):
        composite.quantize(torch.randn(shape), Storage(name).key)


def test_convolutions_are_refused() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3))
    with pytest.raises(stowage.InvalidArgument, match="must have 2 dimensions"):
        stowage.stow(model, "uint4:column8:bf16:zero_rounded")
    assert type(model[0].weight) is nn.Parameter


def test_what_is_not_finite_is_named_where_it_stands() -> None:
    x = values()
    x[7, 3] = torch.nan
    key = Storage("uint4:column4:bf16:zero_rounded").key
    for ops in (library, composite):
        with pytest.raises(RuntimeError, match=f"finite.* at element {7 * COLUMNS + 3}"):
            ops.quantize(x, key)

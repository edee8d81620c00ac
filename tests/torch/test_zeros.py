# SPDX-License-Identifier: Apache-2.0
"""Zero points: the rule in plain words, and what a weight that has them does as a tensor."""

import pytest
import torch
from storages import codec, covering

import stowage
from stowage._ops import composite, library
from stowage._ops.numbers import stochastic
from stowage._ops.numbers.packing import unpack
from stowage._ops.storage import Storage
from stowage._shard.fragments import row_parts, rows_fragment
from stowage._shard.pieces import columns_of, join_columns, take_columns
from stowage._shard.records import encode

NAMES = covering(codec, lambda storage: storage.zero and storage.kind not in ("row2", "column"))
FITTED = [f"{codes}:tensor:zero" for codes in ("int8", "int4")]
FITTED += ["int4:tensor:zero_sum", "uint4:tensor:bf16:zero_rounded"]
TRAVELLERS = [f"{codes}:block8:f16:zero" for codes in ("int8", "int4")]
TRAVELLERS += ["int4:block8:bf16:zero_sum", "uint4:block8:zero_rounded"]


def lopsided(*shape: int) -> torch.Tensor:
    """Values that are not as far below 0 as above it; row 1 has none below, row 2 is zeros."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(5)) + 0.7
    x.view(shape[0], -1)[1].abs_()
    x[2] = 0
    return x


def integers(codes: torch.Tensor, storage: Storage) -> torch.Tensor:
    """What codes stand for before scales and zeros."""
    if storage.byte_codes:
        return codes.view(torch.int8).to(torch.int32)
    if storage.packing == "dense":
        half = 1 << (storage.bits - 1)
        return unpack(codes, storage.packing, storage.bits).int() - half
    return torch.tensor(storage.values).int()[unpack(codes, storage.packing).int()]


@pytest.mark.parametrize(("name", "least", "most"), [("int8", -128, 127), ("int4", -8, 7)])
def test_a_row_takes_all_codes_from_its_least_value_to_its_largest(name, least, most) -> None:
    x, storage = lopsided(5, 300), Storage(f"{name}:row:zero")
    codes, scale, zero = library.quantize(x, storage.key)
    for row in range(5):
        lo, hi = x[row].amin().clamp(max=0), x[row].amax().clamp(min=0)
        s = (hi - lo) / (most - least) if hi > lo else torch.tensor(1.0)
        z = (least - lo / s).clamp(least, most).round()
        assert scale[row] == s and zero[row] == z
        q = (x[row] * (1 / s) + z).clamp(least, most).round()
        assert torch.equal(integers(codes[row], storage).float(), q)
    dense = library.dequantize(codes, [scale, zero], storage.key, [5, 300], x.dtype)
    assert ((dense - x).abs() <= 0.51 * scale).all() and not dense[2].any()


@pytest.mark.parametrize("type", ["", ":bf16", ":f16"])
def test_numbers_are_added_to_products(type: str) -> None:
    x, storage = lopsided(5, 300), Storage(f"int4:row{type}:zero_sum")
    codes, scale, zero = library.quantize(x, storage.key)
    lo, hi = x.amin(1, True).clamp(max=0), x.amax(1, True).clamp(min=0)
    s = torch.where(hi > lo, (hi - lo) / 15, torch.tensor(1.0))
    assert torch.equal(scale, s.to(scale.dtype)) and torch.equal(zero, (lo + 8 * s).to(zero.dtype))
    s, z = scale.float(), zero.float()
    q = integers(codes, storage).float()
    assert torch.equal(q, (x * (1 / s) + -z * (1 / s)).round().clamp(-8, 7))
    dense = library.dequantize(codes, [scale, zero], storage.key, [5, 300], x.dtype)
    assert torch.equal(dense, q * s + z)
    assert ((dense - x).abs() <= 0.6 * s).all() and not dense[2].any()


@pytest.mark.parametrize("type", ["", ":bf16", ":f16"])
def test_numbers_are_taken_off_codes_and_both_results_are_rounded(type: str) -> None:
    x, storage = lopsided(5, 300), Storage(f"uint4:row{type}:zero_rounded")
    codes, scale, zero = library.quantize(x, storage.key)
    lo, hi = x.amin(1, True).clamp(max=0), x.amax(1, True).clamp(min=0)
    s = torch.where(hi > lo, (hi - lo) / 15, torch.tensor(1.0))
    assert torch.equal(scale, s.to(scale.dtype)) and torch.equal(zero, (-lo / s).to(zero.dtype))
    q = integers(codes, storage)
    moved = x * (1 / scale.float()) + zero.float()
    assert torch.equal(q.float(), moved.round().clamp(0, 15))
    own = (q.to(scale.dtype) - zero) * scale  # as torch rounds them, which is hqq's decoder
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        dense = library.dequantize(codes, [scale, zero], storage.key, [5, 300], dtype)
        assert torch.equal(dense, own.to(dtype))
    assert ((own.float() - x).abs() <= 0.6 * scale.float()).all() and not own[2].any()


@pytest.mark.parametrize("ops", [library, composite], ids=["kernels", "composite"])
def test_scales_that_are_not_finite_are_refused(ops) -> None:
    for name, x in (
        ("int8:row:zero", [[-3e38, 3e38]]),
        ("int8:row:f16", [[9e6, 1.0]]),
        ("int4:row:f16:zero_sum", [[0.0, 2e5]]),
    ):
        with pytest.raises(RuntimeError, match=f"finite scales in {name}, got infinity"):
            ops.quantize(torch.tensor(x), Storage(name).key)


@pytest.mark.parametrize("name", NAMES)
def test_products_are_those_of_the_values(name: str) -> None:
    w = stowage.quantize(lopsided(24, 80), name)
    dense, codes, *scales = w.dequantize().double(), *w._parts()
    key = Storage(name).key
    for m in (1, 2, 3, 20, 70):
        x, g = torch.randn(m, 80), torch.randn(m, 24)
        y = library.linear(x, codes, scales, key, 24, None)
        gx = library.linear_grad_input(g, codes, scales, key, 80)
        for got, a, b in ((y, x, dense.t()), (gx, g, dense)):
            bound = 2**-18 * (a.double().abs() @ b.abs()) + 1e-6
            assert ((got.double() - a.double() @ b).abs() <= bound).all()


@pytest.mark.parametrize("name", NAMES)
def test_writes_and_slices_keep_other_rows(name: str) -> None:
    w = stowage.quantize(lopsided(12, 40), name)
    dense = w.dequantize()
    half = w[4:8]
    assert isinstance(half, stowage.StowedTensor) and torch.equal(half.dequantize(), dense[4:8])
    assert torch.equal(torch.cat([w[:4], w[4:]]).dequantize(), dense)
    with torch.no_grad():
        w[5] = 0.25
    after = w.dequantize()
    near = 5 / w._storage.divisor
    assert torch.equal(after[8:], dense[8:]) and (after[5] - 0.25).abs().max() < near
    codes, zero = w._storage.codes, name.split(":")[-1]
    stacked = torch.stack([stowage.quantize(dense, f"{codes}:row:{zero}")] * 2)
    assert str(stacked._storage) == f"{codes}:row2:{zero}" and stacked.shape == (2, 12, 40)
    assert torch.equal(stacked[1].dequantize(), stacked.dequantize()[1])


@pytest.mark.parametrize("name", FITTED)
def test_values_that_do_not_fit_the_zero_of_a_tensor_are_refused(name: str) -> None:
    w = stowage.quantize(lopsided(6, 40), name)
    least = float(w.dequantize().amin())
    with torch.no_grad(), pytest.raises(stowage.Unsupported, match="values from"):
        w[1] = 2 * least


def test_stochastic_codes_are_neighbours_and_go_back_to_where_they_were() -> None:
    x = lopsided(9, 200)
    for name in NAMES:
        storage = Storage(name)
        parts = stochastic.quantize(x, storage, 7)
        nearest = library.quantize(x, storage.key)
        codes, near = (integers(p[0], storage) for p in (parts, nearest))
        assert int((codes - near).count_nonzero()) > 0 and int((codes - near).abs().max()) == 1
        dense = library.dequantize(parts[0], parts[1:], storage.key, x.shape, x.dtype)
        again = stochastic.quantize(dense, storage, 8)
        same = library.dequantize(again[0], again[1:], storage.key, x.shape, x.dtype)
        assert (same - dense).abs().max() <= 5 / storage.divisor * dense.abs().max()


@pytest.mark.parametrize("name", TRAVELLERS)
def test_columns_travel_with_their_zeros(name: str) -> None:
    w = stowage.quantize(lopsided(6, 32), name)
    storage = w._storage
    whole = encode(w._parts(), storage, (6, 32), 0, 6)
    pieces = [columns_of(w, at, at + 16) for at in (0, 16)]
    records = [encode(p._parts(), storage, (6, 16), 0, 6) for p in pieces]
    assert torch.equal(join_columns(records, storage, 6, 32), whole)
    assert torch.equal(take_columns(whole, storage, 32, 16, 32), records[1])


@pytest.mark.parametrize(
    ("codes", "zero", "length"),
    [
        ("int8", "zero", 45),
        ("int4", "zero", 25),
        ("int4", "zero_sum", 28),
        ("uint4", "bf16:zero_rounded", 24),
    ],
)
def test_zeros_that_depend_on_values_of_others_are_not_made(
    codes: str, zero: str, length: int
) -> None:
    fragment = rows_fragment(Storage(f"{codes}:tensor:{zero}"), (8, 40), 2, torch.randn(3, 40))
    with pytest.raises(stowage.Unsupported, match="zeros depend on the least and the largest"):
        row_parts(fragment, torch.zeros(1))
    alone = rows_fragment(Storage(f"{codes}:row:{zero}"), (8, 40), 2, torch.randn(3, 40))
    records, shared = row_parts(alone, torch.zeros(0))
    assert records.shape == (3, length) and not shared

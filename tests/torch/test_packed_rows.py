# SPDX-License-Identifier: Apache-2.0
"""Codes that fill bytes of one row together, as E2M1, int4 and integers of other widths rest:
kernels beside the composite, and the weight as a tensor, in files, in pieces and elsewhere."""

import io
import itertools
import math
import pickle
from pathlib import Path

import pytest
import torch
from model_life import saved_copied_and_trained_through
from storages import codec, covering, of_parts
from torch import Tensor, nn

import stowage
from stowage._ops import composite, library
from stowage._ops.numbers import stochastic
from stowage._ops.numbers.packing import pack, pick, unpack
from stowage._ops.storage import Storage
from stowage._shard.fragments import amaxes, row_parts, rows_fragment
from stowage._shard.pieces import columns_misfit, columns_of, join_columns, take_columns
from stowage._shard.records import decode, encode

PRODUCT, QUOTIENT = "f4_e2m1:block16:e4m3_bf16", "f4_e2m1:block16:e4m3_quotient"
NAMES = covering(codec, lambda storage: storage.packing in ("low_first", "dense"))
SHAPES = (
    (2, 2),
    (130, 200),
    (64, 64),
    (0, 6),
    (5, 0),
    (3, 5, 14),
    (6, 4, 3, 3),
    (0, 8),
    (3, 5, 16),
)
MATRICES = [name for name in NAMES if "row2" not in name and "column" not in name]


def wide(name: str) -> int:
    """Columns that end inside of a group, and of a step of the kernels."""
    return 72 if Storage(name).packing == "dense" else 70


def values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("packing", ["high_first", "low_first"])
def test_packing_is_undone(packing: str) -> None:
    codes = torch.randint(0, 16, (3, 10), dtype=torch.uint8)
    packed = pack(codes, packing)
    assert torch.equal(unpack(packed, packing), codes)
    assert torch.equal(pick(packed, torch.arange(30), packing).view(3, 10), codes.int())
    assert int(pack(torch.tensor([1, 2], dtype=torch.uint8), "low_first")) == 0x21


@pytest.mark.parametrize("bits", range(2, 8))
def test_dense_codes_are_one_string(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (3, 40), dtype=torch.uint8)
    packed = pack(codes, "dense", bits)
    assert packed.dtype == torch.uint8 and packed.shape == (3, 40 * bits // 8)
    assert torch.equal(unpack(packed, "dense", bits), codes)
    for row, line in zip(codes.tolist(), packed.tolist(), strict=True):
        string = sum(code << (i * bits) for i, code in enumerate(row))
        assert bytes(line) == string.to_bytes(len(line), "little")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_composite_makes_and_reads_the_same_bytes(name, shape, dtype) -> None:
    storage = Storage(name)
    if storage.misfit(shape):
        return
    x = values(*shape).double() * 2.0 ** torch.randint(-20, 12, shape)
    x = x.clamp(-6e4, 6e4).to(dtype)
    made, other = library.quantize(x, storage.key), composite.quantize(x, storage.key)
    for mine, theirs, (_, kind, sizes) in zip(made, other, storage.layout(shape), strict=True):
        assert mine.dtype == theirs.dtype == kind and mine.shape == theirs.shape == sizes
        assert torch.equal(mine, theirs)
    args = (made[0], made[1:], storage.key, list(shape), torch.bfloat16)
    assert torch.equal(library.dequantize(*args), composite.dequantize(*args))
    if math.prod(shape):
        one, two = (ops.measure(x, made[0], made[1:], storage.key) for ops in (library, composite))
        torch.testing.assert_close(one, two, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("name", "shape", "rule"),
    [
        ("mxfp4", (4, 33), "an even number of elements in each row"),
        ("f4_e2m1:row2", (4, 2, 33), "an even number of elements in each row"),
        ("f4_e2m1:tensor", (64,), "at least 2 dimensions"),
        ("int4:row:zero", (4, 33), "an even number of elements in each row"),
        ("f4_e2m1:row2", (4, 64), "at least 3 dimensions"),
        ("int3:row", (4, 60), "a multiple of 8 elements in each row"),
        ("int7:row2", (4, 2, 12), "a multiple of 8 elements in each row"),
        ("q6_k", (256,), "at least 2 dimensions"),
    ],
)
def test_rows_that_would_begin_inside_of_a_byte_are_refused(name, shape, rule) -> None:
    storage = Storage(name)
    assert rule in storage.misfit(shape)
    for ops in (library, composite):
        with pytest.raises(RuntimeError, match=rf"{name} must have .*{rule}"):
            ops.quantize(torch.ones(shape), storage.key)
    with pytest.raises(stowage.InvalidArgument, match=rule):
        stowage.quantize(torch.ones(shape), name)


def test_the_power_of_two_is_that_of_the_largest_value() -> None:
    x = values(6, 64) * 2.0 ** torch.randint(-9, 9, (6, 64))
    _, scale = library.quantize(x, Storage("mxfp4").key)
    for i, j in itertools.product(range(6), range(2)):
        amax = float(x[i, 32 * j : 32 * j + 32].abs().max())
        assert int(scale[i, j]) == 127 + math.floor(math.log2(amax)) - 2


@pytest.mark.parametrize("name", MATRICES)
def test_a_weight_is_a_tensor(name: str) -> None:
    w = stowage.quantize(values(12, wide(name)), name)
    dense = w.dequantize()
    joined = torch.cat([w[:4], w[4:]])
    assert isinstance(joined, stowage.StowedTensor) and torch.equal(joined.dequantize(), dense)
    assert isinstance(w[4:8], stowage.StowedTensor) and torch.equal(w[4:8].dequantize(), dense[4:8])
    assert torch.equal(pickle.loads(pickle.dumps(w)).dequantize(), dense)
    saved = io.BytesIO()
    torch.save(w, saved)
    saved.seek(0)
    assert torch.equal(torch.load(saved).dequantize(), dense)
    with torch.no_grad():
        w[5] = w[5] * 0.5
    after = w.dequantize()
    near = [i for i in range(12) if i // 4 != 1] if w._storage.rows else [*range(5), *range(6, 12)]
    assert torch.equal(after[near], dense[near])
    step = 0.5 if w._storage.codes == "int2" else 0.25  # whose values are -2 to 1
    assert (after[5] - dense[5] * 0.5).abs().max() <= step * dense[5].abs().max()


def test_experts_are_slices_and_slices_are_stacked() -> None:
    for name, one in (("mxfp4", "mxfp4"), ("nvfp4", "nvfp4"), ("f4_e2m1:row2", "f4_e2m1:row"),
                      ("f4_e2m1:row", "f4_e2m1:tensor"),
                      ("int4:row2:zero", "int4:row:zero"), ("int3:row2", "int3:row"),
                      ("int5:block32", "int5:block32")):  # fmt: skip
        w = stowage.quantize(values(4, 6, 64), name)
        dense = w.dequantize()
        expert = w[1]
        assert isinstance(expert, stowage.StowedTensor) and str(expert._storage) == one
        assert torch.equal(expert.dequantize(), dense[1])
        both = torch.stack([w[0], w[3]])
        assert isinstance(both, stowage.StowedTensor) and str(both._storage) == name
        assert torch.equal(both.dequantize(), dense[[0, 3]])


@pytest.mark.parametrize("name", ["nvfp4", QUOTIENT])
def test_rows_share_the_number_over_their_scales(name: str) -> None:
    w = stowage.quantize(values(12, 64), name)
    dense, outer = w.dequantize(), w.parts["global_scale"].clone()
    with pytest.raises(stowage.Unsupported, match="values within"):
        w[3:5].copy_(dense[3:5] * 10)
    assert torch.equal(w.dequantize(), dense)
    w[3:5] = dense[3:5] * 0.25  # a power of two, which the scales follow
    assert torch.equal(w.parts["global_scale"], outer)
    assert torch.equal(w.dequantize()[3:5], dense[3:5] * 0.25)
    assert torch.equal(w.dequantize()[[0, 1, 2, *range(5, 12)]], dense[[0, 1, 2, *range(5, 12)]])
    w.copy_(dense * 10)
    fresh = stowage.quantize(dense * 10, name)
    assert all(map(torch.equal, w.parts.values(), fresh.parts.values()))
    assert isinstance(torch.stack([w, w[:]]), stowage.StowedTensor)


@pytest.mark.parametrize("name", ["nvfp4", PRODUCT, QUOTIENT])
def test_scales_of_any_bits_are_read(name: str) -> None:
    """NaN, 0 and negative numbers too, which others may write."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 32)
    outer = torch.tensor(0.3)
    args = ([scale, outer], Storage(name).key, [256, 512], torch.float32)
    got = library.dequantize(codes, *args)
    s = scale.view(torch.float8_e4m3fn).float()
    if name == PRODUCT:
        s = (s.bfloat16() * outer.bfloat16()).float()
    else:
        s = s / outer if name == QUOTIENT else s * outer
    table = torch.tensor(Storage("nvfp4").values)
    wanted = table[unpack(codes, "low_first").int()] * s.repeat_interleave(16, 1)
    assert torch.equal(got.isnan(), wanted.isnan()) and int(got.isnan().sum()) == 2 * 512
    assert torch.equal(got.nan_to_num(7), wanted.nan_to_num(7))
    assert torch.equal(composite.dequantize(codes, *args).nan_to_num(7), wanted.nan_to_num(7))


@pytest.mark.parametrize("name", MATRICES)
def test_a_model_is_saved_copied_and_trained_through(name: str, tmp_path: Path) -> None:
    saved_copied_and_trained_through(name, tmp_path / "model", keep_master="ram")


@pytest.mark.parametrize("name", MATRICES)
def test_rows_travel(name: str) -> None:
    storage, shape = Storage(name), (37, 40)
    parts = library.quantize(values(*shape), storage.key)
    back = [torch.zeros_like(part) for part in parts[: storage.in_rows]]
    for first, last in ((0, 5), (5, 20), (20, 37)):
        decode(encode(parts, storage, shape, first, last), storage, shape, back, first)
    assert all(map(torch.equal, back, parts))


@pytest.mark.parametrize("key", [None, 5])
@pytest.mark.parametrize("name", [n for n in MATRICES if of_parts(Storage(n))])
def test_rows_are_quantized_where_they_lie(name: str, key: int | None) -> None:
    storage, given, cuts = Storage(name), values(9, wide(name)), (0, 4, 9)
    want = library.quantize(given, storage.key)
    if key is not None:
        want = stochastic.quantize(given, storage, key)
    shape = tuple(given.shape)
    mine = [rows_fragment(storage, shape, a, given[a:b]) for a, b in itertools.pairwise(cuts)]
    largest = torch.stack([amaxes(fragment) for fragment in mine]).amax(0)
    for fragment, first, last in zip(mine, cuts, cuts[1:], strict=False):
        records, _ = row_parts(fragment, largest, key)
        assert torch.equal(records, encode(want, storage, shape, first, last))


@pytest.mark.parametrize(
    ("name", "most"), [("mxfp4", 4), ("nvfp4", 8), ("nvfp4:row", 8), ("int3:block16:bf16", 8)]
)
def test_columns_are_cut_between_bytes(name: str, most: int) -> None:
    w = stowage.quantize(values(6, 128), name)
    assert columns_misfit(w._storage, w.shape, most) is None
    assert "whole blocks" in str(columns_misfit(w._storage, w.shape, 2 * most))
    assert "even" in str(columns_misfit(Storage("f4_e2m1:row"), (6, 126), 2))
    assert "a multiple of 8" in str(columns_misfit(Storage("int3:row"), (6, 120), 2))
    pieces = [columns_of(w, first, first + 32) for first in range(0, 128, 32)]
    assert torch.equal(torch.cat([p.dequantize() for p in pieces], 1), w.dequantize())
    whole = encode(w._parts(), w._storage, w.shape, 0, 6)
    cut = [encode(p._parts(), p._storage, p.shape, 0, 6) for p in pieces]
    assert torch.equal(join_columns(cut, w._storage, 6, 128), whole)
    assert torch.equal(take_columns(whole, w._storage, 128, 32, 64), cut[1])


@pytest.mark.parametrize(
    "name", ["mxfp4", "nvfp4", "nvfp4:row", "int4:block32:zero", "int3:block32:zero"]
)
def test_graphs_have_it(name: str) -> None:
    layer, x = nn.Linear(64, 48), torch.randn(3, 64)
    stowage.stow(layer, name)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))


@pytest.mark.parametrize("name", MATRICES)
def test_a_frozen_layer_has_the_values_of_nn_linear(name: str) -> None:
    torch.manual_seed(3)
    plain = nn.Linear(40, 12)
    torch.manual_seed(3)
    layer = stowage.frozen_linear(40, 12, name)
    assert torch.equal(layer.weight.dequantize(), stowage.quantize(plain.weight, name).dequantize())


@pytest.mark.parametrize(
    "name",
    [
        "int4",
        "int4:tensor",
        "int4:row:f16",
        "int4:block4x32",
        "int4:block6:e8m0",
        "int6:block8:bf16",
    ],
)
def test_writes_one_after_the_other_keep_what_they_do_not_name(name: str) -> None:
    w = stowage.quantize(values(12, wide(name)), name)
    dense = w.dequantize()
    with torch.no_grad():
        for column in range(0, 60, 2):
            w[:, column] = 0.0
        w[3:5, 61] = 0.25 * dense[3:5].amax()
    after = w.dequantize()
    dense[:, 0:60:2] = 0
    dense[3:5, 61] = after[3:5, 61]
    assert torch.equal(after, dense)
    with torch.no_grad():
        w[2, 3] = 100.0 if "tensor" not in name else dense.amax()
        w[:, 3] = 100.0
    assert ((w.dequantize()[:, 3] - 100).abs() <= 7).all()


def test_experts_are_written_in_part() -> None:
    w = stowage.quantize(values(3, 4, 10), "int4:row2")
    dense = w.dequantize()
    with torch.no_grad():
        w[1, 2, 5:] = 0.0
        w[:, :, :2] = 0.0
    dense[1, 2, 5:] = 0
    dense[:, :, :2] = 0
    assert torch.equal(w.dequantize(), dense)

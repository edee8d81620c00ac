# SPDX-License-Identifier: Apache-2.0
"""Blocks of rows and columns, and scales that are powers of two: kernels beside the composite, and
beside the rule in plain words."""

import math
from pathlib import Path

import pytest
import torch
from model_life import saved_copied_and_trained_through

import stowage
from stowage._ops import composite, library
from stowage._ops.numbers import stochastic
from stowage._ops.storage import Storage
from stowage._shard.fragments import row_parts, rows_fragment
from stowage._shard.pieces import rows_misfit
from stowage._shard.records import decode, encode

NAMES = ("f8_e4m3:block128x128", "f8_e5m2:block4x32:e8m0", "int8:block16x7", "int8:block64:e8m0")
NAMES += (
    "int8:block128x128:zero",
    "int8:row:zero",
    "int8:tensor:bf16:zero",
    "int8:block64:f16:zero",
)
NAMES += ("f8_e4m3:block128x128:bf16", "int8:row:f16", "f8_e4m3:tensor:bf16", "int8:block48:bf16")
SHAPES = ((1, 1), (3, 5), (130, 200), (64, 64), (0, 5), (5, 0))
SHAPES += ((3, 33, 50), (2, 64, 96), (0, 3, 5), (2, 0, 5), (2, 5, 0))  # stacks of matrices


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_composite_makes_and_reads_the_same_bytes(name, shape, dtype) -> None:
    storage = Storage(name)
    x = torch.randn(shape, dtype=torch.float64) * 2.0 ** torch.randint(-20, 12, shape)
    x = x.to(dtype)
    made, other = library.quantize(x, storage.key), composite.quantize(x, storage.key)
    for mine, theirs, (_, kind, sizes) in zip(made, other, storage.layout(shape), strict=True):
        assert mine.dtype == theirs.dtype == kind and mine.shape == theirs.shape == sizes
        assert torch.equal(mine, theirs)
    args = (made[0], made[1:], storage.key, list(shape), torch.bfloat16)
    assert torch.equal(library.dequantize(*args), composite.dequantize(*args))
    if math.prod(shape):
        one, two = (ops.measure(x, made[0], made[1:], storage.key) for ops in (library, composite))
        torch.testing.assert_close(one, two, rtol=1e-12, atol=0)


def test_the_scale_of_a_block_is_that_of_its_largest_value() -> None:
    x = torch.randn(6, 9)
    for name, power in (("f8_e4m3:block4x5", False), ("f8_e4m3:block4x5:e8m0", True)):
        _, scale = library.quantize(x, Storage(name).key)
        for i in range(2):
            for j in range(2):
                amax = x[4 * i : 4 * i + 4, 5 * j : 5 * j + 5].abs().max()
                wanted = amax / torch.tensor(448.0)
                if power:
                    assert int(scale[i, j]) == 127 + math.ceil(math.log2(wanted))
                else:
                    assert scale[i, j] == wanted


def test_powers_reach_from_a_subnormal_number_to_nan() -> None:
    storage = Storage("int8:block2:e8m0")
    scale = torch.tensor([[0, 1, 127, 254, 255]], dtype=torch.uint8)
    codes = torch.ones(1, 10, dtype=torch.uint8)
    for ops in (library, composite):
        got = ops.dequantize(codes, [scale], storage.key, [1, 10], torch.float32)[0, ::2]
        assert got[:4].tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127] and got[4].isnan()


@pytest.mark.parametrize(
    "name", ["f8_e4m3:block4x32", "f8_e4m3:block4x32:e8m0", "int8:block4x32:bf16:zero"]
)
def test_a_weight_of_blocks_is_a_tensor(name: str) -> None:
    x = torch.randn(10, 40)
    w = stowage.quantize(x, name)
    dense = w.dequantize()
    half = w[4:8]
    assert isinstance(half, stowage.StowedTensor) and torch.equal(half.dequantize(), dense[4:8])
    assert torch.equal(torch.cat([w[:4], w[4:]]).dequantize(), dense)
    assert torch.equal(w[1:3].dequantize() if hasattr(w[1:3], "dequantize") else w[1:3], dense[1:3])
    with torch.no_grad():
        w[5] = 0.25
    after = w.dequantize()
    assert torch.equal(after[:4], dense[:4]) and torch.equal(after[8:], dense[8:])
    assert (after[5] - 0.25).abs().max() < 0.02
    for rest in (4, 6, 7):  # of its block: quantized again
        assert (after[rest] - dense[rest]).abs().max() <= 0.08 * dense[4:8].abs().max()


# Their blocks divide the rows of a matrix, or do not: the next matrix begins blocks of its own.
STACKED = (
    "f8_e4m3:block4x32",
    "f8_e4m3:block16x16:e8m0",
    "int8:block4x32:bf16:zero",
    "f4_e2m1:block4x32",
    "int4:block16x8",
)


@pytest.mark.parametrize("name", STACKED)
@pytest.mark.parametrize("rows", [8, 10])
def test_a_stack_is_its_matrices(name: str, rows: int) -> None:
    x = torch.randn(3, rows, 40)
    each = [stowage.quantize(matrix, name) for matrix in x]
    w = stowage.quantize(x, name)
    joined = torch.stack(each)
    assert isinstance(joined, stowage.StowedTensor)
    for part, other in zip(w.parts.values(), joined.parts.values(), strict=True):
        assert torch.equal(part, other)
    for one, matrix in zip(each, w, strict=True):
        assert isinstance(matrix, stowage.StowedTensor) and matrix.resting == name
        for part, other in zip(one.parts.values(), matrix.parts.values(), strict=True):
            assert torch.equal(part.reshape(-1), other.reshape(-1))
        assert torch.equal(matrix.dequantize(), one.dequantize())
    assert torch.equal(w[1:].dequantize(), w.dequantize()[1:])
    assert isinstance(torch.cat([w[:1], w[1:]]), stowage.StowedTensor)
    assert torch.equal(w[torch.tensor([2, 0])], w.dequantize()[[2, 0]])
    tokens = torch.randn(7, 40)
    found = stowage.grouped_linear(tokens, w, [3, 3, 7])
    wanted = torch.cat([tokens[:3] @ each[0].dequantize().T, tokens[3:] @ each[2].dequantize().T])
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", STACKED)
def test_a_write_to_a_matrix_leaves_the_others(name: str) -> None:
    x = torch.randn(3, 10, 40)
    w = stowage.quantize(x, name)
    before = [part.clone() for part in w.parts.values()]
    with torch.no_grad():
        w[1] = torch.randn(10, 40)
        fresh = w[1].dequantize()
        w[2, 3, 5] = 0.125  # of one block
    codes, scale, *_ = w.parts.values()
    assert torch.equal(codes[0], before[0][0]) and torch.equal(scale[0], before[1][0])
    assert not torch.equal(codes[1], before[0][1])
    assert torch.equal(w[1].dequantize(), fresh)
    after, dense = w.dequantize()[2], stowage.quantize(x, name).dequantize()[2]
    assert (after - dense).abs().max() <= 0.3 * dense.abs().max()
    assert abs(float(after[3, 5]) - 0.125) <= 0.15 * float(dense.abs().max())


@pytest.mark.parametrize("name", STACKED)
def test_matrices_of_a_stack_travel_alone(name: str) -> None:
    """A row of a stack is a matrix, with all of its scales: no other process has anything of it."""
    storage, shape = Storage(name), (5, 10, 40)
    x = torch.randn(shape)
    parts = library.quantize(x, storage.key)
    back = [torch.zeros_like(part) for part in parts]
    for first, last in ((0, 1), (1, 4), (4, 5)):
        decode(encode(parts, storage, shape, first, last), storage, shape, back, first)
        fragment = rows_fragment(storage, shape, first, x[first:last])
        assert fragment.stands_alone and rows_misfit(storage, shape, first, last) is None
        records, shared = row_parts(fragment, torch.zeros(0))
        assert torch.equal(records, encode(parts, storage, shape, first, last)) and shared == []
    assert all(map(torch.equal, back, parts))


@pytest.mark.parametrize("name", STACKED)
def test_a_stack_is_saved_and_rounded_by_chance(name: str, tmp_path: Path) -> None:
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.randn(3, 10, 40))
    values = model.w.detach().clone()
    stowage.stow(model, rules={"w": name})
    stowage.save(model, tmp_path)
    again = torch.nn.Module()
    again.w = torch.nn.Parameter(torch.zeros(3, 10, 40))
    stowage.load(again, tmp_path, mmap=True)
    assert again.w.resting == name and torch.equal(again.w.dequantize(), model.w.dequantize())
    stowage.load(again, tmp_path, ram="64KiB")
    assert torch.equal(again.w.dequantize(), model.w.dequantize())
    bare = torch.nn.Module()
    bare.w = torch.nn.Parameter(torch.zeros(3, 10, 40))
    stowage.load_state_dict(bare, stowage.state_dict(model))  # a label says the blocks
    assert bare.w.resting == name and torch.equal(bare.w.dequantize(), model.w.dequantize())
    one = stochastic.quantize(values, Storage(name), key=7)
    two = [stochastic.quantize(m, Storage(name), 7, 400 * i) for i, m in enumerate(values)]
    for part, pieces in zip(one, zip(*two, strict=True), strict=True):
        assert torch.equal(part.reshape(-1), torch.cat([piece.reshape(-1) for piece in pieces]))


def test_what_has_no_blocks_of_rows_is_refused() -> None:
    for shape in ((4,), (2, 3, 4, 5)):
        with pytest.raises(stowage.InvalidArgument, match="must have 2 or 3 dimensions"):
            stowage.quantize(torch.randn(shape), "f8_e4m3:block2x2")
    with pytest.raises(stowage.InvalidArgument, match="an even number of elements in each row"):
        stowage.quantize(torch.randn(2, 2, 3), "f4_e2m1:block2x2")
    with pytest.raises(stowage.InvalidArgument, match="f8_e4m3"):
        stowage.quantize(torch.randn(3, 4), "f8_e4m3:block3x2")


@pytest.mark.parametrize("name", NAMES)
def test_a_model_of_blocks_is_saved_copied_and_trained_through(name: str, tmp_path: Path) -> None:
    saved_copied_and_trained_through(name, tmp_path / "model")


@pytest.mark.parametrize(
    "name", ["f8_e4m3:block4x32", "int8:block16x7:e8m0", "int8:block4x8:bf16:zero"]
)
def test_rows_travel_with_the_scales_of_their_blocks(name: str) -> None:
    storage, shape = Storage(name), (37, 40)
    parts = library.quantize(torch.randn(shape), storage.key)
    back = [torch.zeros_like(part) for part in parts]
    for first, last in ((0, 5), (5, 20), (20, 37)):
        decode(encode(parts, storage, shape, first, last), storage, shape, back, first)
    assert all(map(torch.equal, back, parts))
    assert rows_misfit(storage, shape, storage.rows, 37) is None
    assert "must begin with a block" in str(rows_misfit(storage, shape, 5, 37))


def test_blocks_whose_rows_are_elsewhere_are_not_made() -> None:
    fragment = rows_fragment(Storage("f8_e4m3:block4x32"), (8, 40), 2, torch.randn(3, 40))
    with pytest.raises(stowage.Unsupported, match="whose blocks have rows of others"):
        row_parts(fragment, torch.zeros(0))

# SPDX-License-Identifier: Apache-2.0
"""What a write to some rows does to codes and scales: only what it must."""

import math

import pytest
import torch
from torch import Tensor, nn

import stowage


def weight(storage: str, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(5))
    return nn.Parameter(stowage.quantize(values, storage, compute_dtype=dtype), False).data


@pytest.mark.parametrize("columns", [63, 64, 65, 96, 256])
@pytest.mark.parametrize("storage", ["f8_e4m3", "int8", "int8:block32", "nf4", "fp4:block32"])
def test_other_rows_keep_their_bytes(storage: str, columns: int) -> None:
    w = weight(storage, 8, columns)
    before = w.clone()
    small = torch.randn(columns).clamp(-0.5, 0.5) * 0.1
    w[3] = small  # fits every block that row 3 shares
    after, was = w.dequantize(), before.dequantize()
    others = torch.arange(8) != 3
    assert torch.equal(after[others], was[others])
    assert (after[3] - small).abs().max() < 0.35
    assert not torch.equal(after[3], was[3])


LOOSE = ["f8_e4m3:row2", "int8:row2", "int5:row2", "f4_e2m1:row2", "f8_e4m3:row", "int8:row"]
LOOSE += ["f8_e4m3:block32", "int4:block32:bf16", "int8:block32:f16", "f4_e2m1:block32"]
LOOSE += ["int4:block32:bf16:zero", "uint4:row2:zero_rounded", "int3:block32:bf16:zero"]


SHAPES = [(6, 8, 64), (8, 64), (4, 4, 4, 8, 8)]


@pytest.mark.parametrize(
    ("storage", "shape"),
    [(s, shape) for s in LOOSE for shape in SHAPES if len(shape) > 2 or ":row2" not in s],
)
def test_groups_that_were_not_written_keep_scales_that_others_made(
    storage: str, shape: tuple[int, ...]
) -> None:
    """Of a calibrated file, or under one scale for all: the largest code is not the largest."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    w = nn.Parameter(stowage.quantize(values, storage), False).data
    scale = next(part for part in w.parts.values() if part.is_floating_point())
    scale.mul_(1.5)  # exact in bf16 and f16 too, nearly
    before, was = w.dequantize(), scale.clone()
    written = torch.zeros(shape, dtype=torch.bool)
    if len(shape) > 2:
        written[1, 3] = True
        w[1, 3] = 9.0
    else:
        written[3] = True
        w[3] = 9.0
    each = math.prod(shape) // scale.numel()  # of a group, of values that lie together
    shares = written.reshape(-1, each).any(1)
    keeps = ~shares.repeat_interleave(each).view(shape)
    assert keeps.any() and torch.equal(w.dequantize()[keeps], before[keeps])
    assert torch.equal(scale.reshape(-1)[~shares], was.reshape(-1)[~shares])


WRITTEN = [*LOOSE, "nvfp4", "f4_e2m1:block16:e4m3_bf16", "f4_e2m1:block16:e4m3_quotient"]
WRITTEN += ["nvfp4:row", "nvfp4:row2", "mxfp4", "mxfp4:transposed", "q4_k", "q6_k", "int8:tensor"]
WRITTEN += ["int8:row:absmax", "f8_e4m3:block32x32", "nf4", "int4:block32:zero_sum"]


@pytest.mark.parametrize("which", [(..., 3), (..., 3, 5), (..., slice(2, 5), slice(7, 90))])
@pytest.mark.parametrize("storage", WRITTEN)
def test_a_write_in_part_is_as_near_as_quantizing_its_result(
    storage: str, which: tuple[object, ...]
) -> None:
    """Whatever scales, and numbers over them, become others: what was not written too."""
    values = torch.randn(4, 32, 256, generator=torch.Generator().manual_seed(5))
    w = nn.Parameter(stowage.quantize(values, storage), False).data
    wanted = w.dequantize().clone()
    wanted[which] = 20.0
    w[which] = 20.0
    error = (w.dequantize() - wanted).norm()
    again = (stowage.quantize(wanted, storage).dequantize() - wanted).norm()
    assert error <= 1.1 * again + 1e-3 * wanted.norm()


@pytest.mark.parametrize("storage", ["q4_k", "q6_k"])
def test_superblocks_that_were_not_written_keep_their_bytes(storage: str) -> None:
    values = torch.randn(3, 8, 96, generator=torch.Generator().manual_seed(5))
    w = nn.Parameter(stowage.quantize(values, storage), False).data
    before = [part.clone() for part in w.parts.values()]
    w[1, 3] = 9.0  # elements 288 to 383 of the 768 of row 1: the second of its three superblocks
    for part, was in zip(w.parts.values(), before, strict=True):
        changed = part.ne(was).view(9, -1).any(1)
        assert changed.nonzero().flatten().tolist() in ([4], [])
    assert not torch.equal(next(iter(w.parts.values())), before[0])


@pytest.mark.parametrize("storage", ["nf4", "fp4"])
@pytest.mark.parametrize("columns", [63, 96])
def test_block_shared_with_other_rows_refuses_what_does_not_fit(storage: str, columns: int) -> None:
    w = weight(storage, 8, columns)
    before = w.dequantize()
    with pytest.raises(stowage.Unsupported, match="shares scales"):
        w[3] = 100.0
    with pytest.raises(stowage.Unsupported, match="shares scales"):
        w.index_fill_(0, torch.tensor([3]), 100.0)  # of the whole weight, but no whole write
    assert torch.equal(w.dequantize(), before)
    w.fill_(100.0)
    assert torch.equal(w.dequantize(), torch.full((8, columns), 100.0))


@pytest.mark.parametrize("storage", ["nf4", "nf4:block64:nested", "fp4:block32:nested"])
def test_odd_tail(storage: str) -> None:
    w = weight(storage, 7, 33)  # 231 elements: half a byte and a short block at the end
    before = w.dequantize()
    w[6] = 0.0
    assert torch.equal(w.dequantize()[6], torch.zeros(33))
    assert torch.equal(w.dequantize()[:6], before[:6])


@pytest.mark.parametrize("storage", ["int8", "nf4", "f8_e4m3:row", "nf4:block64:nested"])
def test_written_rows_rest_as_quantize_makes_them(storage: str) -> None:
    w = weight(storage, 16, 128)
    fresh = torch.randn(16, 128)
    w.copy_(fresh)
    for a, b in zip(w.parts.values(), stowage.quantize(fresh, storage).parts.values(), strict=True):
        assert torch.equal(a, b)


def test_a_bf16_weight_is_requantized_from_fp32() -> None:
    """Elements of a changed row that were not written keep their codes, not those of their bf16."""
    w = weight("int8", 4, 512, torch.bfloat16)
    codes = w.parts["codes"].clone()
    w[1, 0] = 0.0
    changed = (w.parts["codes"] != codes).nonzero().tolist()
    assert changed == [[1, 0]]


@pytest.mark.parametrize("storage", ["int8:tensor", "f8_e4m3:tensor"])
def test_tensor_scale_is_kept_or_the_write_refused(storage: str) -> None:
    w = weight(storage, 8, 64)
    before, scale = w.dequantize(), w.parts["scale"].clone()
    w[2] = 0.5
    assert torch.equal(w.parts["scale"], scale)
    assert torch.equal(w.dequantize()[3:], before[3:])
    with pytest.raises(stowage.Unsupported, match="within"):
        w[2] = 100.0
    w.fill_(100.0)
    assert torch.allclose(w.dequantize(), torch.tensor(100.0))


@pytest.mark.parametrize("storage", ["int8:tensor", "f8_e4m3:tensor", "nf4", "int4:tensor"])
def test_a_column_of_all_rows_may_have_new_scales(storage: str) -> None:
    w = weight(storage, 8, 64)
    wanted = w.dequantize()
    w[:, 2] = wanted[:, 2] = 100.0
    assert torch.equal(w.dequantize(), stowage.quantize(wanted, storage).dequantize())


def test_a_kept_scale_reaches_to_the_last_value_that_it_holds() -> None:
    w = stowage.quantize(torch.tensor([[448.0] * 4, [1.0] * 4]), "f8_e4m3:tensor")
    last = torch.tensor(448 * (1 + 2.0**-20))  # what fp32 products of a rounded scale may exceed
    w[1] = last
    assert torch.equal(w.dequantize()[1], torch.full((4,), 448.0))
    with pytest.raises(stowage.Unsupported, match="within"):
        w[1] = last.nextafter(torch.tensor(math.inf))


@pytest.mark.parametrize("storage", ["f8_e4m3", "bf16"])
def test_values_that_are_not_finite_at_rest_may_stay(storage: str) -> None:
    w = weight(storage, 4, 64)
    w.parts["codes"].view(torch.uint8 if storage == "f8_e4m3" else torch.int16)[1, 2] = (
        0x7F if storage == "f8_e4m3" else 0x7FC0
    )
    wanted = w.dequantize() * 2
    assert int(wanted.isnan().sum()) == 1
    w.mul_(2)  # the whole weight
    assert torch.equal(w.dequantize().nan_to_num(7.0), wanted.nan_to_num(7.0))
    w[1].mul_(2)
    wanted[1] *= 2
    assert torch.equal(w.dequantize().nan_to_num(7.0), wanted.nan_to_num(7.0))
    with pytest.raises(stowage.InvalidArgument, match="must be finite"):
        w[2, 0] = math.nan


@pytest.mark.parametrize("storage", ["int8", "int8:tensor", "nf4"])
def test_only_what_accumulates_must_change_more_than_rounding_does(storage: str) -> None:
    w = weight(storage, 4, 64)
    wanted = w.dequantize() + 1e-6
    with pytest.raises(stowage.Unsupported, match="rounding step"):
        w.add_(1e-6)
    with pytest.raises(stowage.Unsupported, match="rounding step"):
        w[1].add_(1e-6)
    w[1] = wanted[1]
    assert torch.allclose(w.dequantize(), wanted, atol=1e-5)
    w.copy_(wanted)
    assert torch.allclose(w.dequantize(), wanted, atol=1e-5)


def test_nested_scales_take_the_smallest_that_holds_the_block() -> None:
    w = weight("nf4:block64:nested", 64, 64)
    before = w.dequantize()
    row = before[7].flip(0) * 0.9
    w[5] = row
    assert torch.equal(w.dequantize()[6:], before[6:])
    assert (w.dequantize()[5] - row).norm() < 0.15 * row.norm()
    with pytest.raises(stowage.Unsupported, match="block maxima"):
        w[5] = 1e-3  # far below the scales beside it: it would come out as zeros


@pytest.mark.parametrize(
    "storage", ["int8:row2", "f8_e4m3:row2", "int8:row", "nf4", "int8:block16"]
)
def test_three_dimensions(storage: str) -> None:
    values = torch.randn(3, 4, 64)
    w = stowage.quantize(values, storage)
    before = w.dequantize()
    w[1].mul_(3)
    w[2, 0] = 1.0
    wanted = before.clone()
    wanted[1] *= 3
    wanted[2, 0] = 1.0
    assert torch.equal(w.dequantize()[0], before[0])
    assert torch.equal(w.dequantize(), stowage.quantize(wanted, storage).dequantize())


@pytest.mark.parametrize("storage", ["int8", "nf4", "nf4:block64:nested"])
def test_a_row_of_a_large_weight_costs_a_row(storage: str) -> None:
    w = weight(storage, 512, 128)
    before, row = w.dequantize(), w.dequantize()[9]
    with torch.autograd.profiler.profile() as profile:
        w[9] = row * -1
        w[7:10][1].copy_(row)
        w[[3, 4]]  # reads two rows
        w.abs()  # reads all
    names = [e.name for e in profile.function_events]
    assert names.count("stowage::dequantize") == 1 and "stowage::embedding" in names
    after, same = w.dequantize(), torch.arange(512)
    assert torch.equal(after[9], -row) or "nf4" in storage
    assert (after[8] - row).abs().max() <= 0.3 and (after[9] + row).abs().max() <= 0.3
    others = (same != 8) & (same != 9)
    assert torch.equal(after[others], before[others])


def test_scalars_and_vectors() -> None:
    w = stowage.quantize(torch.tensor(0.75), "f8_e4m3")
    w.fill_(0.5)
    assert float(w.dequantize()) == 0.5
    for written, value in ((True, 0.25), (False, 0.125)):
        w.masked_fill_(torch.tensor(written), value)
        assert float(w.dequantize()) == 0.25
    v = stowage.quantize(torch.arange(8.0), "int8:tensor")
    v[2] = 7.0
    assert torch.allclose(v.dequantize()[2], torch.tensor(7.0))
    stowage.quantize(torch.empty(0, 8), "int8").zero_()


# Groups of rows and columns that one scale is of: [10, 80] ends inside of blocks both ways.
GROUPS = {
    "int4:row": (1, 80),
    "int4:block32": (1, 32),
    "int4:block4x32": (4, 32),
    "int4:block32:bf16": (1, 32),
    "int4:block32:zero": (1, 32),
    "f8_e4m3:block4x32": (4, 32),
    "mxfp4": (1, 32),
}


@pytest.mark.parametrize("storage", GROUPS)
def test_a_value_is_written_into_its_group_alone(storage: str) -> None:
    w = weight(storage, 10, 80)
    before, (rows, columns) = w.dequantize(), GROUPS[storage]
    for i, j in ((9, 70), (1, 2)):
        fits = float(before[i, j - 1])  # the group holds it already
        w[i, j] = fits
        wanted = before.clone()
        wanted[i, j] = fits
        group = (
            slice(i // rows * rows, (i // rows + 1) * rows),
            slice(j // columns * columns, (j // columns + 1) * columns),
        )
        after = w.dequantize()
        if storage.startswith("int4") and "zero" not in storage:  # its scale is kept
            assert torch.equal(after, wanted)
        assert torch.allclose(after[group], wanted[group], atol=0.1)
        w[i, j] = wanted[i, j] = 100.0
        after, fresh = w.dequantize(), stowage.quantize(wanted, storage).dequantize()
        assert torch.equal(after[group], fresh[group])
        after[group] = before[group]
        assert torch.equal(after, before)
        w.copy_(before)
        before = w.dequantize()


def test_rows_of_experts_are_written_alone() -> None:
    values = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(5))
    w = stowage.quantize(values, "int4:row2")
    wanted = w.dequantize()
    w[1, 2, 3] = wanted[1, 2, 3] = float(wanted[1, 2, 4])
    assert torch.equal(w.dequantize(), wanted)
    w[1, 2, 3] = wanted[1, 2, 3] = 100.0
    fresh = stowage.quantize(wanted, "int4:row2").dequantize()
    wanted[1, 2] = fresh[1, 2]
    assert torch.equal(w.dequantize(), wanted)


@pytest.mark.parametrize("storage", ["int4:tensor", "int4:tensor:zero"])
def test_a_scale_of_all_is_kept_where_zero_points_stand(storage: str) -> None:
    values = torch.linspace(1, 4, 64).reshape(8, 8)
    values[0, 0] = -0.5
    w = stowage.quantize(values, storage)
    before, scale = w.dequantize(), float(w.parts["scale"].float().max())
    low, high = float(before.min()), float(before.max())
    for fits in (low, high):
        w[2, 3] = fits
        before[2, 3] = fits
        assert torch.equal(w.dequantize(), before)
    beyond = [high + 0.6 * scale]
    if storage.endswith("zero"):
        beyond.append(low - 0.6 * scale)
    for value in beyond:
        with pytest.raises(stowage.Unsupported, match=r"within|from"):
            w[2, 3] = value
        assert torch.equal(w.dequantize(), before)


@pytest.mark.parametrize("storage", ["nf4", "fp4"])
def test_a_short_last_block_has_a_scale_of_its_own_values(storage: str) -> None:
    w = weight(storage, 5, 96)  # 480 elements: half a block at the end
    wanted = w.dequantize()
    w[4] = wanted[4] = torch.randn(96, generator=torch.Generator().manual_seed(6)) * 0.01
    (codes, absmax), fresh = w.parts.values(), [*stowage.quantize(wanted, storage).parts.values()]
    assert torch.equal(absmax[-1], fresh[1][-1])
    assert torch.equal(codes.view(-1)[-16:], fresh[0].view(-1)[-16:])


def test_a_short_last_block_is_divided_as_a_whole_write_divides_it() -> None:
    """bitsandbytes divides there, and multiplies by the reciprocal in full blocks: values between
    two codes, for which that is not the same."""
    table = stowage.quantize(torch.linspace(-1, 1, 64), "nf4").dequantize().unique()
    between = (table[1:] + table[:-1]) / 2
    largest = torch.rand(20_000, generator=torch.Generator().manual_seed(7)) + 0.5
    found = 0
    for ulps in range(-2, 3):
        x = largest[:, None] * between * (1 + ulps * 2.0**-24)
        quotient, product = x / largest[:, None], x * (1 / largest)[:, None]
        for i, j in ((quotient > between) != (product > between)).nonzero().tolist()[:100]:
            w = weight("nf4", 3, 96)
            wanted = w.dequantize()
            row = torch.zeros(96)
            row[64], row[65] = largest[i], x[i, j]
            w[2] = wanted[2] = row
            codes = stowage.quantize(wanted, "nf4").parts["codes"].view(-1)[-16:]
            assert torch.equal(w.parts["codes"].view(-1)[-16:], codes)
            full = stowage.quantize(row[64:].repeat(2), "nf4").parts["codes"].view(-1)[:16]
            found += not torch.equal(full, codes)
    assert found

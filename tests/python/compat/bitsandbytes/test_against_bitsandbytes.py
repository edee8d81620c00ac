# SPDX-License-Identifier: Apache-2.0
"""The installed bitsandbytes and our facade, given the same values: equal bytes, equal values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stowage.compat.bitsandbytes as ours

theirs = pytest.importorskip("bitsandbytes")
F, P = ours.functional, theirs.functional

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BLOCKS = [32, 64, 128, 256, 512, 1024, 2048, 4096]
STANDARD, NIGHTLY = 5_000, 100_000  # blocks of each of the ten cases with random values


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """bitsandbytes compiles its fallbacks for each shape anew."""
    with torch.compiler.set_stance("force_eager"):
        yield


def drawn(blocks: int, block: int, seed: int) -> torch.Tensor:
    """Blocks of many sizes and shapes of distribution, with ties, zeros and tiny values."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(blocks, block, generator=rng)
    x *= torch.exp2(torch.randint(-30, 12, (blocks, 1), generator=rng).float())
    kind = torch.randint(0, 8, (blocks,), generator=rng)
    x[kind == 1] = 0
    x[kind == 2] = x[kind == 2].exp().clamp(max=1e4)
    x[kind == 3] = (x[kind == 3] * 8).round() / 8  # a lattice has ties
    table = F.get_4bit_type("nf4", device="cpu")
    middle = ((table[1:] + table[:-1]) / 2).repeat(block)[:block]
    middle[0] = 1
    x[kind == 4] = middle
    return x


def comparable(values: torch.Tensor) -> torch.Tensor:
    """Without NaN; and bitsandbytes' AVX-512 kernel flushes what is subnormal in bf16."""
    values = values.nan_to_num()
    if values.dtype is torch.bfloat16:
        values[values.abs() < torch.finfo(values.dtype).smallest_normal] = 0
    return values


def compared(x: torch.Tensor, kind: str, block: int, quant_storage: Any = torch.uint8) -> None:
    packed, state = F.quantize_4bit(x, None, None, block, False, kind, quant_storage)
    peer, its = P.quantize_4bit(x, None, None, block, False, kind, quant_storage)
    assert packed.dtype is peer.dtype and packed.shape == peer.shape
    bits = (t.contiguous().view(-1).view(torch.uint8) for t in (packed, peer))
    assert torch.equal(*bits)
    assert torch.equal(state.absmax.view(torch.int32), its.absmax.view(torch.int32)) or (
        torch.equal(state.absmax.isnan(), its.absmax.isnan())
        and torch.equal(state.absmax.nan_to_num(), its.absmax.nan_to_num())
    )
    # bitsandbytes decodes rows that blocks do not divide wrongly: give it a flat weight.
    flat = P.QuantState(its.absmax, torch.Size([x.numel()]), its.code, block, kind, x.dtype)
    expected = P.dequantize_4bit(peer, flat)
    values = F.dequantize_4bit(packed, state).view(-1)
    assert torch.equal(comparable(values), comparable(expected.view(-1)))
    assert torch.equal(state.code, its.code)


def compared_nested(x: torch.Tensor, kind: str, block: int) -> None:
    packed, state = F.quantize_4bit(x, None, None, block, True, kind)
    peer, its = P.quantize_4bit(x, None, None, block, True, kind)
    assert torch.equal(packed, peer)
    difference = (state.offset - its.offset).abs()
    assert difference <= torch.nextafter(its.offset, torch.tensor(math.inf)) - its.offset
    # Their function, given our map and offset, makes our bytes.
    plain = P.quantize_4bit(x, None, None, block, False, kind)[1].absmax
    second, nested = P.quantize_blockwise(plain - state.offset, state.state2.code, blocksize=256)
    assert torch.equal(second, state.absmax)
    assert torch.equal(nested.absmax, state.state2.absmax)
    # And ours, given their map and offset, theirs.
    again, nested = F.quantize_blockwise(plain - its.offset, its.state2.code, blocksize=256)
    assert torch.equal(again, its.absmax)
    assert torch.equal(nested.absmax, its.state2.absmax)
    its.shape = torch.Size([x.numel()])
    expected = P.dequantize_4bit(peer, its).reshape(-1)
    assert torch.equal(F.dequantize_4bit(peer, its).reshape(-1), expected)


def all_cases(blocks: int) -> None:
    count = 0
    for kind in ("nf4", "fp4"):
        for dtype in DTYPES:
            compared(drawn(blocks, 64, count).to(dtype), kind, 64)
            count += blocks
        for block in (32, 128):
            compared(drawn(blocks, block, count), kind, block)
            count += blocks
    assert count == 10 * blocks
    for kind in ("nf4", "fp4"):
        compared_nested(drawn(blocks, 64, count), kind, 64)
        count += blocks


def test_equal_bytes_for_fifty_thousand_blocks() -> None:
    all_cases(STANDARD)


@pytest.mark.nightly
def test_equal_bytes_for_a_million_blocks() -> None:
    all_cases(NIGHTLY)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_every_block_size_with_tails(kind: str, block: int) -> None:
    for count in (1, 2, block - 1, block + 1, 3 * block, 5 * block + 7):
        x = drawn(8, block, count).view(-1)[:count]
        compared(x, kind, block)
        compared_nested(x + 1, kind, block)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values_and_layouts(kind: str, dtype: torch.dtype) -> None:
    x = drawn(64, 64, 5).to(dtype)
    compared(torch.zeros(3, 100, dtype=dtype), kind, 64)
    compared(x.t(), kind, 64)
    compared(x[::2, 1::3], kind, 64)
    compared(x.view(4, 16, 8, 8).permute(2, 0, 3, 1), kind, 64)
    compared(x.expand(2, 64, 64), kind, 64)
    tiny = torch.finfo(dtype).smallest_normal
    compared(x.sign() * tiny / 4, kind, 64)
    x[3, 5], x[7, 0], x[9, 1], x[9, 2] = math.nan, math.inf, -math.inf, math.nan
    compared(x, kind, 64)


@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    block=st.sampled_from(BLOCKS),
    kind=st.sampled_from(["nf4", "fp4"]),
    seed=st.integers(0, 2**20),
)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_shape(shape: list[int], dtype: torch.dtype, block: int, kind: str, seed: int) -> None:
    count = math.prod(shape)
    x = drawn(-(-count // 64), 64, seed).view(-1)[:count].view(shape).to(dtype)
    compared(x, kind, block)
    compared(x.transpose(0, -1), kind, block)


@pytest.mark.parametrize("quant_storage", [torch.bfloat16, torch.float16, torch.float32])
def test_bytes_held_as_another_dtype(quant_storage: torch.dtype) -> None:
    compared(drawn(32, 64, 1), "nf4", 64, quant_storage)


@pytest.mark.parametrize("nested", [False, True])
def test_each_side_reads_the_states_of_the_other(nested: bool) -> None:
    x = drawn(64, 128, 3)
    packed, state = F.quantize_4bit(x, compress_statistics=nested, quant_type="nf4")
    peer, its = P.quantize_4bit(x, compress_statistics=nested, quant_type="nf4")
    expected = F.dequantize_4bit(packed, state)
    as_theirs = P.QuantState.from_dict(state.as_dict(packed=True), torch.device("cpu"))
    assert torch.equal(P.dequantize_4bit(packed, as_theirs), expected)
    assert torch.equal(P.dequantize_4bit(packed, state), expected)
    as_ours = F.QuantState.from_dict(its.as_dict(packed=True), torch.device("cpu"))
    assert torch.equal(F.dequantize_4bit(peer, as_ours), P.dequantize_4bit(peer, its))
    assert torch.equal(F.dequantize_4bit(peer, its), P.dequantize_4bit(peer, its))
    mine, other = state.as_dict(packed=True), its.as_dict(packed=True)
    assert [*mine] == [*other]
    if not nested:  # the text of the state too; nested it holds an offset
        assert all(torch.equal(mine[key], other[key]) for key in mine)


def test_tables_are_theirs() -> None:
    for name in ("nf4", "fp4", "af4"):
        assert torch.equal(F.get_4bit_type(name, "cpu"), P.get_4bit_type(name, "cpu"))
    torch.testing.assert_close(F.create_dynamic_map(), P.create_dynamic_map(), rtol=3e-7, atol=0)
    assert torch.equal(F.create_dynamic_map(False), P.create_dynamic_map(False))
    assert torch.equal(F.create_linear_map(), P.create_linear_map())


@pytest.mark.parametrize("dtype", DTYPES)
def test_blockwise_equals_theirs(dtype: torch.dtype) -> None:
    for count, block in ((4096, 256), (1000, 64), (77, 128)):
        x = drawn(64, 64, count).to(dtype).view(-1)[:count]
        code = P.create_dynamic_map()
        codes, state = F.quantize_blockwise(x, code, blocksize=block)
        peer, its = P.quantize_blockwise(x, code, blocksize=block)
        assert torch.equal(codes, peer) and torch.equal(state.absmax, its.absmax)
        assert torch.equal(F.dequantize_blockwise(codes, state), P.dequantize_blockwise(peer, its))

# SPDX-License-Identifier: Apache-2.0
"""The functions of the facade: arguments, states, refusals. Equality with bitsandbytes itself is
in test_against_bitsandbytes.py."""

from __future__ import annotations

import io
import math
import zlib
from typing import Any

import pytest
import torch

import stowage
import stowage.compat.bitsandbytes as bnb
from stowage.compat.bitsandbytes import functional as F

ROUND_TRIPS = [("nf4", False), ("nf4", True), ("fp4", False), ("fp4", True)]


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(math.prod(shape))).to(dtype)


def golden() -> torch.Tensor:
    """65,536 values whose bitsandbytes codes have known CRCs."""
    state, made = 12345, []
    for i in range(65536):
        state = (1664525 * state + 1013904223) % 2**32
        made.append((((state >> 16) & 0x1FFF) - 4096) / 4096 * 2.0 ** -((i // 64) % 3))
    return torch.tensor(made).view(256, 256)


def crc(tensor: torch.Tensor) -> str:
    return f"{zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()):08x}"


def test_codes_are_those_that_are_known() -> None:
    x = golden()
    assert crc(x) == "666d504a"
    packed, state = F.quantize_nf4(x)
    assert (crc(packed), crc(state.absmax)) == ("e495b6f3", "b728e840")
    assert crc(F.dequantize_nf4(packed, state)) == "07c9d891"
    packed, state = F.quantize_nf4(x, compress_statistics=True)
    assert (crc(state.absmax), crc(state.state2.absmax)) == ("6b3f2276", "6e564f4a")
    assert state.offset.item().hex() == "0x1.2647a40000000p-1"
    assert crc(F.create_dynamic_map()) == crc(state.state2.code) == "1b137aeb"
    assert crc(F.dequantize_4bit(packed, state)) == "3a5396de"


@pytest.mark.parametrize(("kind", "nested"), ROUND_TRIPS)
@pytest.mark.parametrize("shape", [(64, 128), (5, 7, 3), (1,), (999,), (0, 4)])
def test_any_shape_equals_what_stowage_makes(
    kind: str, nested: bool, shape: tuple[int, ...]
) -> None:
    x = values(*shape)
    packed, state = F.quantize_4bit(x, blocksize=32, compress_statistics=nested, quant_type=kind)
    ours = stowage.quantize(x, f"{kind}:block32{':nested' if nested else ''}")
    assert torch.equal(packed, ours.parts["codes"])
    assert packed.shape == ((x.numel() + 1) // 2, 1)
    back = F.dequantize_4bit(packed, state)
    assert back.dtype == x.dtype and torch.equal(back, ours.dequantize())
    assert (state.nested, state.blocksize, state.quant_type) == (nested, 32, kind)
    assert (state.shape, state.dtype) == (x.shape, x.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int8])
def test_bytes_may_be_held_as_another_dtype(dtype: torch.dtype) -> None:
    x = values(64, 64)
    plain, _ = F.quantize_4bit(x, quant_type="nf4")
    packed, state = F.quantize_4bit(x, quant_type="nf4", quant_storage=dtype)
    assert packed.dtype is dtype and packed.shape == (2048 // dtype.itemsize, 1)
    assert torch.equal(packed.view(-1).view(torch.uint8), plain.view(-1))
    assert torch.equal(F.dequantize_4bit(packed, state), F.dequantize_4bit(plain, state))
    with pytest.raises(ValueError, match="quant_storage must divide 3 bytes"):
        F.quantize_4bit(values(6), quant_storage=torch.float32)


def test_results_may_be_given() -> None:
    x = values(32, 64)
    absmax, out, back = (
        torch.zeros(32),
        torch.zeros(1024, 1, dtype=torch.uint8),
        torch.zeros(x.shape),
    )
    packed, state = F.quantize_fp4(x, absmax, out)
    assert packed is out and state.absmax is absmax and absmax.min() > 0
    assert F.dequantize_fp4(packed, absmax=absmax, out=back) is back
    assert torch.equal(back, F.dequantize_fp4(packed, state))


def test_a_row_of_codes_gives_the_transpose() -> None:
    x = values(16, 64)
    packed, state = F.quantize_nf4(x)
    assert torch.equal(F.dequantize_4bit(packed.t(), state), F.dequantize_4bit(packed, state).t())
    one, its = F.quantize_nf4(values(1, 2))  # one byte is no row
    assert F.dequantize_4bit(one, its).shape == (1, 2)


@pytest.mark.parametrize("nested", [False, True])
def test_a_state_goes_through_its_dict(nested: bool) -> None:
    packed, state = F.quantize_4bit(values(64, 96), compress_statistics=nested, quant_type="nf4")
    for flat in (state.as_dict(), state.as_dict(packed=True)):
        given = {f"layer.weight.{key}": value for key, value in flat.items()}
        before = dict(given)
        back = F.QuantState.from_dict(given, torch.device("cpu"))
        assert given.keys() == before.keys()  # not eaten
        assert back == state
        assert torch.equal(F.dequantize_4bit(packed, back), F.dequantize_4bit(packed, state))
    assert all(isinstance(part, torch.Tensor) for part in state.as_dict(packed=True).values())
    assert torch.equal(state.bitsandbytes__nf4, flat["quant_state.bitsandbytes__nf4"])
    with pytest.raises(AttributeError, match="bitsandbytes__fp4"):
        state.bitsandbytes__fp4  # noqa: B018
    assert state[1:4] == [state.shape, state.dtype, state.blocksize]
    other = F.quantize_4bit(values(64, 96) * 2, compress_statistics=nested, quant_type="nf4")[1]
    assert other != state


def test_states_are_safe_to_load() -> None:
    _, state = F.quantize_4bit(values(64, 64), compress_statistics=True)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == state


def _of_type(name: str) -> dict[str, Any]:
    return F.quantize_nf4(values(64))[1].as_dict() | {"quant_type": name}


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: F.quantize_4bit(values(64).double()), "A must be float32, float16 or bfloat16"),
        (lambda: F.quantize_4bit(values(64), blocksize=48), "blocksize must be one of"),
        (lambda: F.quantize_4bit(values(64), quant_type="int4"), "quant_type must be"),
        (lambda: F.dequantize_4bit(torch.zeros(4, 1)), "absmax and out must be given"),
        (lambda: F.quantize_blockwise(values(64), blocksize=0), "blocksize must be positive"),
        (lambda: F.dequantize_blockwise(torch.zeros(4)), "absmax or quant_state"),
        (lambda: F.QuantState.from_dict({}, "cpu"), "exactly one quant_state"),
        (lambda: F.QuantState.from_dict({"quant_type": "nf4"}, "cpu"), "missing .*absmax"),
        (lambda: F.QuantState.from_dict(_of_type("nf4:foo"), "cpu"), "quant_type must be one of"),
        (lambda: F.gemv_4bit(values(1, 4), torch.zeros(4, 1)), "quant_state must be given"),
    ],
)
def test_refusals_say_what_must_hold(call: Any, says: str) -> None:
    with pytest.raises(ValueError, match=f"(stowage|QuantState).*{says}"):
        call()


def test_codes_and_state_must_belong_together() -> None:
    packed, state = F.quantize_nf4(values(64, 64))
    with pytest.raises(ValueError, match="must be 2048 bytes, got 1024"):
        F.dequantize_4bit(packed[:1024], state)
    state.packing_format_for_cpu = True  # what bitsandbytes sets after an eval forward
    with pytest.raises(ValueError, match="rearranged"):
        F.dequantize_4bit(packed, state)
    with pytest.raises(NotImplementedError, match="never rearranged"):
        F._convert_weight_packed_for_cpu(packed, state)


def test_what_is_not_finite_is_kept_unless_nested() -> None:
    x = values(4, 64)
    x[1, 3], x[2, 5] = math.nan, math.inf
    back = F.dequantize_nf4(*F.quantize_nf4(x))
    assert back[1].isnan().all() and not back[2].isfinite().all() and back[3].isfinite().all()
    with pytest.raises(ValueError, match="finite"):
        F.quantize_nf4(x, compress_statistics=True)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_and_their_gradients(dtype: torch.dtype, nested: bool) -> None:
    packed, state = F.quantize_4bit(values(48, 96, dtype=dtype), None, None, 64, nested, "nf4")
    dense = F.dequantize_4bit(packed, state).float()
    x, bias = values(2, 3, 96, dtype=dtype).requires_grad_(), values(48, dtype=dtype)
    bias.requires_grad_()
    y = bnb.matmul_4bit(x, packed.t(), quant_state=state, bias=bias)
    expected = torch.nn.functional.linear(x.float(), dense, bias.float())
    close = dict(rtol=2e-2, atol=6e-2) if dtype is not torch.float32 else dict(rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(y.float(), expected, **close)
    y.sum().backward()
    assert bias.grad is not None and torch.allclose(bias.grad.float(), torch.tensor(6.0))
    torch.testing.assert_close(x.grad.float(), dense.sum(0).expand(2, 3, 96), **close)
    row = F.gemv_4bit(x[:1, 0].detach(), packed, state=state)
    torch.testing.assert_close(row.float(), (expected - bias.float())[:1, 0], **close)
    with pytest.warns(DeprecationWarning, match="taken as"):
        turned = bnb.matmul_4bit(values(2, 48, dtype=dtype), packed, state)
    torch.testing.assert_close(turned.float(), values(2, 48, dtype=dtype).float() @ dense, **close)
    out = torch.empty(2, 3, 48, dtype=dtype)
    assert bnb.matmul_4bit(x.detach(), packed, state, out, bias.detach()) is out
    assert torch.equal(out, y)


@pytest.mark.parametrize("shape", [(1000,), (3, 300), (0,)])
def test_8_bit_codes_of_a_table(shape: tuple[int, ...]) -> None:
    x = values(*shape)
    codes, state = F.quantize_blockwise(x, blocksize=256)
    assert codes.shape == x.shape and codes.dtype is torch.uint8
    back = F.dequantize_blockwise(codes, state)
    assert back.shape == x.shape and (back - x).abs().sum() <= 0.02 * x.abs().sum()
    assert torch.equal(F.dequantize_blockwise(codes, absmax=state.absmax, blocksize=256), back)
    assert not F.dequantize_blockwise(*F.quantize_blockwise(torch.zeros(100))).any()


def test_tables() -> None:
    for kind in ("nf4", "fp4"):
        table = F.get_4bit_type(kind, device="cpu")
        assert table.shape == (16,) and table.abs().max() == 1
    assert F.create_dynamic_map().diff().min() > 0

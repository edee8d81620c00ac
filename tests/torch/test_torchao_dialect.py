# SPDX-License-Identifier: Apache-2.0
"""nf4:torchao by the kernels and by the composite: the same bytes; golden values of the peer."""

import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stowage._ops import composite, library
from stowage._ops.storage import Storage

NAMES = (
    "nf4:torchao",
    "nf4:torchao:block16:scaler2",
    "nf4:torchao:block32:scaler1",
    "nf4:torchao:block128:scaler4",
)
OWN = ("f32", "bf16", "f16", "f64")
OUTS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def raw(t: Tensor) -> bytes:
    return t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def golden() -> Tensor:
    s, values = 12345, []
    for i in range(65536):
        s = (1664525 * s + 1013904223) % 2**32
        values.append(((s >> 16 & 0x1FFF) - 4096) / 4096 * 2.0 ** -(i // 64 % 3))
    return torch.tensor(values, dtype=torch.float64).view(256, 256)


GOLDEN = {
    torch.float32: (0x4F411F88, 0x15FCC44D, 0x30D12F65, 0x51159966, "0x1.2647a4p-1"),
    torch.bfloat16: (0x6919114A, 0x7B1A59DC, 0x0F7B6A6B, 0x5A7826DE, "0x1.26p-1"),
    torch.float16: (0xF58BEB28, 0x72960DA8, 0x91BCDCE7, 0xC1F21CBC, "0x1.264p-1"),
}


@pytest.mark.parametrize("door", [library, composite], ids=["op", "composite"])
@pytest.mark.parametrize("own", GOLDEN, ids=str)
def test_parts_and_values_equal_torchao(door, own) -> None:
    codes, scalers, factor, decoded, mean = GOLDEN[own]
    kind = Storage("nf4:torchao")
    parts = door.quantize(golden().to(own), kind.key, False)
    crcs = [zlib.crc32(raw(part)) for part in parts[:3]]
    assert crcs == [codes, scalers, factor]
    assert float(parts[3]) == float.fromhex(mean)
    key = kind.for_values(own).key
    assert zlib.crc32(raw(door.dequantize(parts[0], parts[1:], key, (256, 256), own))) == decoded


@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("name", NAMES)
def test_composite_gives_the_bytes_of_the_kernels(name, own, values) -> None:
    kind = Storage(f"{name}:{own}")
    for shape in ((32768,), (128, 256), (16384, 2)):
        for given_dtype in OUTS:
            x = values(shape, given_dtype)
            ours = library.quantize(x, kind.key)
            theirs = composite.quantize(x, kind.key)
            for part, a, b in zip(kind.part_names, ours, theirs, strict=True):
                assert raw(a) == raw(b), (shape, given_dtype, part)
        ids = torch.tensor([3, 0, shape[0] - 1])
        codes, *scales = ours
        for out in OUTS:
            args = (codes, scales, kind.key, shape, out)
            assert raw(library.dequantize(*args)) == raw(composite.dequantize(*args)), (shape, out)
            assert raw(library.embedding(ids, *args)) == raw(composite.embedding(ids, *args))


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_any_whole_scaler_blocks(data: st.DataObject) -> None:
    block = 2 ** data.draw(st.integers(5, 9))
    scaler = 2 ** data.draw(st.integers(0, 4))
    own = data.draw(st.sampled_from(OWN))
    rows = data.draw(st.sampled_from([1, 2, 3, 8, 32]))
    count = data.draw(st.integers(0, 3)) * block * scaler * rows
    shape = (rows, count // rows)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(count)).to(
        data.draw(st.sampled_from(OUTS))
    )
    kind = Storage(f"nf4:torchao:block{block}:scaler{scaler}:{own}")
    ours, theirs = library.quantize(x, kind.key), composite.quantize(x, kind.key)
    assert [raw(a) for a in ours] == [raw(b) for b in theirs]
    assert [(p.dtype, tuple(p.shape)) for p in ours] == [p[1:] for p in kind.layout(shape)]
    args = (ours[0], ours[1:], kind.key, shape, torch.bfloat16)
    assert raw(library.dequantize(*args)) == raw(composite.dequantize(*args))


@pytest.mark.parametrize("own", OWN)
def test_products_are_those_of_the_dequantized_weight(own) -> None:
    kind = Storage(f"nf4:torchao:{own}")
    codes, *scales = library.quantize(torch.randn(128, 256), kind.key)
    for dtype in (torch.float32, torch.bfloat16):
        dense = library.dequantize(codes, scales, kind.key, (128, 256), dtype)
        for m in (1, 4, 100):
            x, g = torch.randn(m, 256).to(dtype), torch.randn(m, 128).to(dtype)
            near = {"rtol": 1e-2, "atol": 0.2} if dtype == torch.bfloat16 else {}
            y = library.linear(x, codes, scales, kind.key, 128, None)
            torch.testing.assert_close(y, x @ dense.T, **(near or {"rtol": 1e-5, "atol": 1e-4}))
            gx = library.linear_grad_input(g, codes, scales, kind.key, 256)
            torch.testing.assert_close(gx, g @ dense, **(near or {"rtol": 1e-5, "atol": 1e-4}))


def test_refuses_shapes_by_rule_in_every_door() -> None:
    kind = Storage("nf4:torchao:bf16")
    rule = "multiple of 16384 elements"
    for door in (library, composite):
        with pytest.raises(RuntimeError, match=rule):
            door.quantize(torch.ones(3, 64), kind.key, False)
        with pytest.raises(RuntimeError, match="at most 2 dimensions"):
            door.quantize(torch.ones(2, 64, 128), kind.key, False)
    with pytest.raises(RuntimeError, match=rule):
        library.quantize(torch.ones(3, 64, device="meta"), kind.key)
    parts = library.quantize(torch.ones(128, 128), kind.key)
    for door in (library, composite):
        with pytest.raises(RuntimeError, match="name the dtype"):
            door.dequantize(
                parts[0], parts[1:], Storage("nf4:torchao").key, (128, 128), torch.float32
            )


def test_refuses_values_that_are_not_finite() -> None:
    for door in (library, composite):
        with pytest.raises(RuntimeError, match=r"finite.*element 70"):
            x = torch.ones(16384)
            x[70] = float("nan")
            door.quantize(x, Storage("nf4:torchao").key, False)


def test_fakes_have_the_parts_of_the_values_dtype() -> None:
    kind = Storage("nf4:torchao")
    parts = library.quantize(torch.empty(128, 128, device="meta", dtype=torch.float16), kind.key)
    assert [p.dtype for p in parts[2:]] == [torch.float16] * 3

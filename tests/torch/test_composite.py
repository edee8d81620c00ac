# SPDX-License-Identifier: Apache-2.0
"""The composite of stock torch ops against the kernels: the same bytes, and no forbidden op."""

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pretended_cuda
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stowage._ops import composite, library
from stowage._ops.storage import Storage

SHAPES = ((), (0,), (1,), (7,), (0, 3), (3, 0), (33, 65), (64, 256), (5, 3, 7), (2, 3, 4, 5))
SHAPES += ((33, 70), (2, 3, 4, 6))


@pytest.fixture(params=["stock ops", "kernels of a pretended device"])
def other(
    request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch
) -> SimpleNamespace:
    """The composite on the device under test; on the CPU it is called past the dispatcher, once
    more with kernels as for a CUDA device."""
    if request.param != "stock ops":
        if device != "cpu":
            pytest.skip("a real device is under test")
        if pretended_cuda.library() is None:
            pytest.skip("needs the C++ tests to be built")
        monkeypatch.setattr(composite, "kernels_of", pretended_cuda.kernels_of)

    def moved(function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            return torch.utils._pytree.tree_map_only(
                Tensor,
                Tensor.cpu,
                function(*torch.utils._pytree.tree_map_only(Tensor, lambda t: t.to(device), args)),
            )

        return call

    names = ("quantize", "dequantize", "embedding", "amax", "measure", "linear")
    names += ("linear_grad_input",)
    source = composite if device == "cpu" else library
    return SimpleNamespace(**{n: moved(getattr(source, n)) for n in names})


def same_bytes(a: Tensor, b: Tensor) -> bool:
    def raw(t: Tensor) -> Tensor:
        return t.contiguous().reshape(-1).view(torch.uint8)

    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))


def fits(storage: Storage, shape: Sequence[int]) -> bool:
    least = {"row": 1, "block": 1, "row2": 2}.get(storage.kind, 0)
    return (storage.flat or len(shape) >= least) and not storage.misfit(shape)


def test_quantize_gives_the_same_bytes(storage, dtype, values, other) -> None:
    kind = Storage(storage)
    for shape in (s for s in SHAPES if fits(kind, s)):
        x = values(shape, dtype)
        ours, theirs = library.quantize(x, kind.key), other.quantize(x, kind.key, False)
        names = [
            n for n, a, b in zip(kind.part_names, ours, theirs, strict=True) if not same_bytes(a, b)
        ]
        assert names == [], (shape, names)


def test_dequantize_gives_the_same_bytes(storage, dtype, values, other) -> None:
    kind = Storage(storage)
    for shape in (s for s in SHAPES if fits(kind, s)):
        codes, *scales = library.quantize(values(shape, torch.float32), kind.key)
        args = (codes, scales, kind.key, shape, dtype)
        assert same_bytes(library.dequantize(*args), other.dequantize(*args)), shape


def test_every_code_dequantizes_to_the_same_bytes(storage, dtype, other) -> None:
    kind = Storage(storage)
    if kind.codes == "f32":
        return
    count = 65536 if kind.holds_values else 256
    every = torch.arange(count, dtype=torch.int32)
    codes = (
        every.to(torch.int16).view(kind.codes_dtype) if kind.holds_values else every.to(torch.uint8)
    )
    if kind.packing == "dense":
        codes = codes.repeat(8 * kind.bits)  # whole rows of 64
    elements = kind.elements_of(codes.numel())
    shape = (elements // 64, 64)
    codes = codes.view(kind.layout(shape)[0][2])
    _, *scales = library.quantize(torch.rand(shape) + 0.5, kind.key)
    args = (codes, scales, kind.key, shape, dtype)
    assert same_bytes(library.dequantize(*args), other.dequantize(*args))


def test_embedding_gives_the_same_bytes(storage, dtype, values, other) -> None:
    kind = Storage(storage)
    for shape in ((33, 65), (64, 256), (40, 3, 5), (9, 0), (33, 66)):
        if not fits(kind, shape):
            continue
        codes, *scales = library.quantize(values(shape, torch.float32), kind.key)
        for ids in (torch.tensor([[0, 8], [3, 3]]), torch.arange(5, dtype=torch.int32)):
            args = (ids, codes, scales, kind.key, shape, dtype)
            assert same_bytes(library.embedding(*args), other.embedding(*args)), shape


def test_amax_gives_the_same_bits(dtype, values, other) -> None:
    given = [values(shape, dtype) for shape in SHAPES]
    given.append(values((64, 48), dtype).t()[3::2, 5:])
    for special in ((-0.0,), (1.0, -math.inf), (math.nan, 1.0), (-math.nan, math.inf), (2**-149,)):
        given.append(torch.tensor(special, dtype=torch.float64).to(dtype))
    found = library.amax(given)
    want = [x.float().abs().max() if x.numel() else torch.tensor(0.0) for x in given]
    want = [torch.tensor(math.nan) if w.isnan() else w for w in want]
    assert same_bytes(found, torch.stack(want))
    assert same_bytes(found, other.amax(given))


def test_measure_agrees(storage, dtype, values, other) -> None:
    kind = Storage(storage)
    x = values((33, 66 if kind.packing == "low_first" else 65), dtype)
    codes, *scales = library.quantize(x, kind.key)
    ours = library.measure(x, codes, scales, kind.key)
    theirs = other.measure(x, codes, scales, kind.key)
    assert torch.equal(ours[:4], theirs[:4])
    torch.testing.assert_close(ours[4:7], theirs[4:7], rtol=1e-12, atol=0)
    assert ours[7] == theirs[7]  # the worst block


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_nonfinite_values(storage, dtype, bad, values, other) -> None:
    kind = Storage(storage)
    x = values((3, 70), dtype)
    x[1, 4] = bad
    for function in (library.quantize, other.quantize):
        with pytest.raises(RuntimeError, match=r"^\[invalid_argument\] .* finite.* element 74"):
            function(x, kind.key, False)
    if kind.kind != "none" and (not kind.flat or kind.nested):
        with pytest.raises(RuntimeError, match="finite"):
            library.quantize(x, kind.key, True)
        return
    ours, theirs = library.quantize(x, kind.key, True), other.quantize(x, kind.key, True)
    assert all(same_bytes(a, b) for a, b in zip(ours, theirs, strict=True))


# --- what may be done to bf16 and float8 tensors -------------------------------------------------

_NARROW = {torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}
# Casts, views, copies, new memory.
_ALLOWED = {
    "aten::_reshape_alias",
    "aten::_to_copy",
    "aten::_unsafe_view",
    "aten::alias",
    "aten::clone",
    "aten::copy_",
    "aten::detach",
    "aten::empty.memory_format",
    "aten::expand",
    "aten::new_empty",
    "aten::reshape",
    "aten::select.int",
    "aten::slice.Tensor",
    "aten::t",
    "aten::unsqueeze",
    "aten::view",
    "aten::view.dtype",
}


class NoNarrowArithmetic(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        found = torch.utils._pytree.tree_leaves((args, kwargs, out))
        narrow = any(isinstance(t, Tensor) and t.dtype in _NARROW for t in found)
        name = func.name().removesuffix(".default")
        assert not narrow or name in _ALLOWED, f"{name} on a bf16 or float8 tensor"
        return out


def test_the_mode_can_fail() -> None:
    x = torch.ones(2, dtype=torch.bfloat16)
    with NoNarrowArithmetic(), pytest.raises(AssertionError, match="aten::add"):
        x + 1


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def test_no_arithmetic_on_narrow_tensors(storage, narrow, values) -> None:
    kind = Storage(storage)
    x = values((16, 64), narrow)
    with NoNarrowArithmetic():
        codes, *scales = composite.quantize(x, kind.key)
        composite.dequantize(codes, scales, kind.key, (16, 64), narrow)
        composite.embedding(torch.arange(3), codes, scales, kind.key, (16, 64), narrow)
        composite.measure(x, codes, scales, kind.key)
        composite.linear(x[:3], codes, scales, kind.key, 16, x[0, :16], False)
        composite.linear_grad_input(x[:3, :16], codes, scales, kind.key, 64, False)


def test_flush_denormal_is_refused(values) -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no flush mode")
    try:
        with pytest.raises(RuntimeError, match=r"^\[unsupported\] .*set_flush_denormal"):
            composite.quantize(torch.ones(4), Storage("nf4").key)
    finally:
        torch.set_flush_denormal(False)


def test_exact_bf16_is_refused() -> None:
    kind, x = Storage("int8"), torch.ones(4, 4, dtype=torch.bfloat16)
    codes, *scales = library.quantize(x, kind.key)
    with pytest.raises(RuntimeError, match=r"^\[unsupported\] .*bf16"):
        composite.linear(x, codes, scales, kind.key, 4, None, True)

# SPDX-License-Identifier: Apache-2.0
"""Every op checks its arguments itself, in our words, before anything reads their memory."""

import re

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from stowage import StowedTensor
from stowage._ops import composite, library
from stowage._ops.storage import Storage

KIND = Storage("int8:row")


@pytest.fixture(params=["kernels", "composite"])
def linear(request: pytest.FixtureRequest):
    return library.linear if request.param == "kernels" else composite.linear


def weight(kind: Storage = KIND, rows: int = 8, columns: int = 64) -> tuple[Tensor, list[Tensor]]:
    codes, *scales = library.quantize(torch.randn(rows, columns), kind.key)
    return codes, scales


X = torch.randn(3, 64)
CODES, SCALES = weight()
_B = torch.bfloat16

LINEAR = [
    ((X.long(), CODES, SCALES, KIND.key, 8, None), "x must be .*got (int64|long)"),
    ((X.double(), CODES, SCALES, KIND.key, 8, None), "x must be .*got float64"),
    (
        (torch.tensor(1.0), CODES, SCALES, KIND.key, 8, None),
        "x must have at least 1 dimension, got 0",
    ),
    ((X[:, :63], CODES, SCALES, KIND.key, 8, None), r"x must be \[\.\.\., 64\], got \[3, 63\]"),
    ((X, CODES.float(), SCALES, KIND.key, 8, None), "codes must be .*uint8, got .*float32"),
    ((X, CODES[0], SCALES, KIND.key, 8, None), "codes must have 2 dimensions, got 1"),
    ((X, CODES, SCALES, KIND.key, 9, None), r"codes must be \[9, 64\], got \[8, 64\]"),
    ((X, CODES, [], KIND.key, 8, None), "scales of int8:row must be 1 tensors, got 0"),
    ((X, CODES, SCALES * 2, KIND.key, 8, None), "scales of int8:row must be 1 tensors, got 2"),
    ((X, CODES, [SCALES[0].double()], KIND.key, 8, None), "scale must be .*float32, got .*float64"),
    ((X, CODES, [SCALES[0][:7]], KIND.key, 8, None), r"scale must be \[8, 1\], got \[7, 1\]"),
    ((X, CODES, SCALES, KIND.key, 8, torch.ones(8, dtype=_B)), "bias must be .*float32 like x"),
    ((X, CODES, SCALES, KIND.key, 8, torch.ones(7)), r"bias must be \[8\], got \[7\]"),
    ((X, CODES, SCALES, KIND.key, 8, torch.ones(8, 1)), r"bias must be \[8\], got \[8, 1\]"),
    ((X, CODES, SCALES, -5, 8, None), "storage key"),
]


@pytest.mark.parametrize(("args", "text"), LINEAR, ids=[text for _, text in LINEAR])
def test_linear(linear, args, text) -> None:
    with pytest.raises(RuntimeError, match=r"^\[invalid_argument\] .*" + text):
        linear(*args)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: library.quantize(X.long(), KIND.key), "x must be"),
        (lambda: library.quantize(torch.tensor(1.0), KIND.key), "at least 1 dimension"),
        (
            lambda: library.dequantize(CODES, SCALES, KIND.key, [8, 65], _B),
            r"codes must be \[8, 65\]",
        ),
        (lambda: library.dequantize(CODES, SCALES, KIND.key, [8, 64], torch.int32), "out must be"),
        (lambda: library.dequantize(CODES, SCALES, KIND.key, [-8, 64], _B), "negative"),
        (lambda: library.embedding(X, CODES, SCALES, KIND.key, [8, 64], _B), "ids must be"),
        (
            lambda: library.embedding(torch.tensor([8]), CODES, SCALES, KIND.key, [8, 64], _B),
            r"\[0, 8\), got 8",
        ),
        (
            lambda: library.embedding(torch.tensor([-1]), CODES, SCALES, KIND.key, [8, 64], _B),
            r"\[0, 8\), got -1",
        ),
        (
            lambda: library.linear_grad_input(X, CODES, SCALES, KIND.key, 64),
            r"g must be \[\.\.\., 8\], got \[3, 64\]",
        ),
        (
            lambda: library.embedding(
                torch.tensor([1]), CODES, [SCALES[0].to_sparse()], KIND.key, [8, 64], _B
            ),
            "scale must be dense, got torch.sparse_coo",
        ),
        (lambda: library.amax([X, X.long()]), "x must be float64, float32, .*got int64"),
        (lambda: composite.amax([X, X.long()]), "x must be one of .*got int64"),
        (lambda: library.amax([X.to("meta"), X]), "x must be on (meta|the CPU)"),
        (
            lambda: composite.measure(torch.tensor(1.0), CODES, SCALES, KIND.key),
            "must have rank 1 or more",
        ),
        (lambda: library.measure(X, CODES, SCALES, KIND.key), r"codes must be \[3, 64\]"),
        (lambda: library.linear(X, CODES.to("meta"), SCALES, KIND.key, 8, None), "on the CPU|meta"),
    ],
)
def test_other_ops(call, text) -> None:
    with pytest.raises(RuntimeError, match=text):
        call()


def released(tensor: Tensor) -> Tensor:
    """As FSDP leaves a gathered weight: sizes without memory."""
    copy = tensor.clone()
    copy.untyped_storage().resize_(0)
    return copy


@pytest.mark.parametrize("which", ["x", "codes", "scale", "bias"])
@pytest.mark.parametrize("exact", [False, True])
def test_released_memory(which, exact) -> None:
    given = {"x": X, "codes": CODES, "scale": SCALES[0], "bias": torch.ones(8)}
    given[which] = released(given[which])
    args = (given["x"], given["codes"], [given["scale"]], KIND.key, 8, given["bias"], exact)
    with pytest.raises(RuntimeError, match=rf"{which} must have its memory.*storage was released"):
        library.linear(*args)


@pytest.mark.parametrize(
    "name", ["quantize", "dequantize", "linear_grad_input", "embedding", "amax"]
)
def test_released_memory_in_other_ops(name) -> None:
    codes, shape = released(CODES), [8, 64]
    calls = {
        "quantize": lambda: library.quantize(released(X), KIND.key),
        "amax": lambda: library.amax([X, released(X)]),
        "dequantize": lambda: library.dequantize(codes, SCALES, KIND.key, shape, _B),
        "linear_grad_input": lambda: library.linear_grad_input(
            X[:, :8], codes, SCALES, KIND.key, 64
        ),
        "embedding": lambda: library.embedding(torch.arange(2), codes, SCALES, KIND.key, shape, _B),
    }
    with pytest.raises(RuntimeError, match="storage was released"):
        calls[name]()


def test_what_is_kept_from_inside_a_transform() -> None:
    kept: list[Tensor] = []
    torch.func.grad(lambda x: (kept.append(x), x.sum())[1])(X)
    w = StowedTensor([CODES, *SCALES], "int8:row", (8, 64), torch.float32)
    with pytest.raises(RuntimeError, match=r"x must have memory of its own.*torch\.func"):
        F.linear(kept[0], w)
    assert torch.equal(F.linear(kept[0].clone(), w), F.linear(X, w))


def test_a_result_that_no_memory_holds() -> None:
    rows = torch.empty(2**50, 5, 0)
    said = r"\[out_of_memory\] stowage: the system must have memory .*1125899906842624, 1, 1\], F32"
    with pytest.raises(RuntimeError, match=said):
        library.quantize(rows, KIND.key)


def test_any_strides_will_do(storage) -> None:
    kind = Storage(storage)
    w = torch.randn(64, 24).t()
    assert not w.is_contiguous()
    parts = library.quantize(w, kind.key)
    for ours, plain in zip(parts, library.quantize(w.contiguous(), kind.key), strict=True):
        assert torch.equal(ours, plain)
    codes, scales = parts[0], parts[1:]
    spread = [torch.stack([p, p], -1)[..., 0] for p in parts]
    x = torch.randn(64, 3).t()
    args = (scales, kind.key, 24, torch.randn(48)[::2])
    ours = library.linear(x, spread[0], spread[1:], *args[1:])
    assert torch.equal(ours, library.linear(x.contiguous(), codes, *args))
    shape, ids = [24, 64], torch.arange(10)[::3]
    ours = library.embedding(ids, spread[0], spread[1:], kind.key, shape, torch.float32)
    dense = library.dequantize(codes, scales, kind.key, shape, torch.float32)
    assert torch.equal(ours, dense[ids])


def test_empty_sizes(storage) -> None:
    kind = Storage(storage)
    for rows, columns in ((0, 8), (8, 0), (0, 0)):
        codes, scales = weight(kind, rows, columns)
        bias = torch.arange(float(rows))
        y = library.linear(torch.ones(2, columns), codes, scales, kind.key, rows, bias)
        assert torch.equal(y, bias.expand(2, rows))
        gx = library.linear_grad_input(torch.ones(2, rows), codes, scales, kind.key, columns)
        assert torch.equal(gx, torch.zeros(2, columns))
    codes, scales = weight(kind)
    for exact in (False, True):
        y = library.linear(torch.ones(0, 64), codes, scales, kind.key, 8, None, exact)
        assert y.shape == (0, 8)
        gx = library.linear_grad_input(torch.ones(0, 8), codes, scales, kind.key, 64, exact)
        assert gx.shape == (0, 64)


def test_messages_are_one_line() -> None:
    with pytest.raises(RuntimeError) as caught:
        library.linear(X[:, :63], CODES, SCALES, KIND.key, 8, None)
    assert re.fullmatch(
        r"\[invalid_argument\] stowage::linear: .*, got \[3, 63\]", str(caught.value)
    )

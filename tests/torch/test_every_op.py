# SPDX-License-Identifier: Apache-2.0
"""Every op for every storage and dialect, in every regime of rows, in every compute dtype, both
ways, against the slow reference: stock torch's decoder (stowage.composite) and products in fp64."""

from __future__ import annotations

import pytest
import torch
from storages import codec, covering, flat_shapes
from torch import Tensor
from torch.nn import functional as F

import stowage
from stowage._ops import composite, library
from stowage._ops.storage import Storage
from stowage._tensor.products import convolution, grouped
from stowage._tensor.slices import lying_matrix

TORCHAO = [f"nf4:torchao:block16:scaler2:{t}" for t in ("f32", "bf16")]
TORCHAO += [f"nf4:torchao:block32:scaler2:{t}" for t in ("f16", "f64")]
DENSE = ["int2:row", "int3:block32:bf16", "int5:tensor", "int7:block8:f16:zero", "q6_k"]
EVERY = [*covering(codec, flat_shapes), "nf4:block32", "nf4:block128:nested", *DENSE, *TORCHAO]
LARGE = ["int8:block6", "nf4:block128:nested", TORCHAO[1], TORCHAO[3]]  # a decoder each
COMPUTE = (torch.float32, torch.bfloat16, torch.float16)
VALUES = (*COMPUTE, torch.float64)
ROWS_OF_X = (1, 2, 3, 4, 16, 17, 64, 65, 129, 300)
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def weight(kind: Storage, *shape: int) -> tuple[Tensor, list[Tensor]]:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(5)) * 0.1
    codes, *scales = library.quantize(values, kind.key)
    return codes, scales


def odd(kind: Storage, columns: int) -> int:
    """So many columns, or a few less where rows begin on bytes."""
    return columns if kind.flat else columns // kind.together * kind.together


def raw(t: Tensor) -> Tensor:
    return t.contiguous().view(-1).view(torch.uint8)


def near(y: Tensor, a: Tensor, w: Tensor, bias: Tensor | None = None) -> None:
    """The bound of docs/numbers.md, and a part of it that no zeros can pass."""
    exact, size = a.double() @ w.double(), a.double().abs() @ w.double().abs()
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    slack = 0.0 if y.dtype == torch.float32 else 2.0**-8
    limit = UNIT[y.dtype] * exact.abs() + ((a.shape[1] + 8) * 2.0**-24 + slack) * size
    error = (y.double() - exact).abs()
    assert bool((error <= limit + 2.0**-24).all()), (error / limit).max()
    assert error.norm() <= 0.02 * exact.norm()


def check_products(kind: Storage, rows: int, columns: int, batches: tuple[int, ...]) -> None:
    codes, scales = weight(kind, rows, columns)
    for dtype in COMPUTE:
        w = composite.dequantize(codes, scales, kind.key, (rows, columns), dtype)
        bias = torch.randn(rows).to(dtype)
        for m in batches:
            x, g = torch.randn(m, columns).to(dtype), torch.randn(m, rows).to(dtype)
            given = (codes, scales, kind.key)
            near(library.linear(x, *given, rows, bias), x, w.t(), bias)
            if len(scales) == 1:
                one = torch.ops.stowage._linear(x, codes, scales[0], kind.key, rows)
                near(one, x, w.t())
            near(library.linear_grad_input(g, *given, columns), g, w)
            assert torch.equal(library.linear(x, *given, rows, bias, True), F.linear(x, w, bias))
            assert torch.equal(library.linear_grad_input(g, *given, columns, True), g @ w)


@pytest.mark.parametrize("name", EVERY)
def test_products(name: str, kernels: None) -> None:
    """Tiny; groups that rows cut; whole vectors, where dot products are used."""
    kind = Storage(name)
    check_products(kind, 5, 64, (1, 4, 65))
    check_products(kind, 66, 96 if kind.dialect == "torchao" else odd(kind, 99), ROWS_OF_X)
    check_products(kind, 65, 320, (1, 3, 4, 16, 65))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n if n in LARGE else pytest.param(n, marks=pytest.mark.nightly) for n in EVERY]
)
def test_products_of_several_tiles(name: str, kernels: None) -> None:
    """Above 4 MiB of dequantized weight, the gradient goes by tiles of columns, linear by rows."""
    kind = Storage(name)
    rows, columns = 1312, 1088 if kind.dialect == "torchao" else odd(kind, 1091)
    codes, scales = weight(kind, rows, columns)
    w = composite.dequantize(codes, scales, kind.key, (rows, columns), torch.float32)
    for m in (65, 150):
        x, g = torch.randn(m, columns), torch.randn(m, rows)
        near(library.linear(x, codes, scales, kind.key, rows, None), x, w.t())
        near(library.linear_grad_input(g, codes, scales, kind.key, columns), g, w)


@pytest.mark.parametrize("name", EVERY)
def test_values(name: str, kernels: None) -> None:
    """quantize, dequantize, embedding, amax and measure: the bytes of the reference."""
    kind = Storage(name)
    shapes = [(66, 96), (2, 64)] if kind.dialect == "torchao" else [(66, 99), (7, 2, 33), (1, 5)]
    shapes = [(*shape[:-1], odd(kind, shape[-1])) for shape in shapes]
    for shape in (s for s in shapes if not kind.misfit(s)):
        for given in VALUES:
            x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(given)
            parts = library.quantize(x, kind.key)
            for a, b in zip(parts, composite.quantize(x, kind.key), strict=True):
                assert torch.equal(raw(a), raw(b)), (shape, given)
            loss = library.measure(x, parts[0], parts[1:], kind.key)
            theirs = composite.measure(x, parts[0], parts[1:], kind.key)
            torch.testing.assert_close(loss, theirs, rtol=1e-12, atol=0)
        codes, scales = parts[0], parts[1:]
        ids = torch.tensor([[0, shape[0] - 1], [shape[0] // 2, 0]], dtype=torch.int32)
        for out in VALUES:
            args = (codes, scales, kind.key, shape, out)
            w = composite.dequantize(*args)
            assert torch.equal(raw(library.dequantize(*args)), raw(w)), (shape, out)
            for rows in (ids, ids.long(), ids[:0]):
                found = library.embedding(rows, *args)
                assert torch.equal(raw(found), raw(w[rows.long()])), (shape, out)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags(name: str, mode: str) -> None:
    kind, shape = Storage(name), (10, 64)
    codes, *scales = library.quantize(torch.randn(shape), kind.key)
    dense = composite.dequantize(codes, scales, kind.key, shape, torch.float32)
    table = torch.nn.EmbeddingBag(*shape, mode=mode, _weight=dense.clone())
    stowage.stow(table, rules={"weight": kind.for_values(torch.float32).name})
    ids, offsets = torch.tensor([1, 9, 9, 0, 3]), torch.tensor([0, 0, 3])
    rests = table.weight.dequantize()
    weights = torch.rand(5) if mode == "sum" else None
    wanted = F.embedding_bag(ids, rests, offsets, mode=mode, per_sample_weights=weights)
    assert torch.equal(table(ids, offsets, weights), wanted)


@pytest.mark.parametrize("name", [n for n in EVERY if n not in TORCHAO])
def test_convolutions(name: str) -> None:
    """The ops for weights of more than a tile, called on small ones: dense, transposed, grouped."""
    kind = Storage(name)
    for shape, transposed, groups in (((6, 4, 3), False, 1), ((6, 2, 3), False, 2),
                                      ((4, 3, 3), True, 2)):  # fmt: skip
        if kind.misfit(shape):
            continue
        codes, scales = weight(kind, *shape)
        for dtype in (torch.float32, torch.bfloat16):
            w = composite.dequantize(codes, scales, kind.key, shape, dtype)
            x = torch.randn(2, 4, 9).to(dtype).requires_grad_()
            bias = torch.randn(6).to(dtype)
            options = ([2], [1], [1], transposed, [0], groups)
            dense = torch.ops.aten.convolution(x, w, bias, *options)
            given = (codes, scales, kind.key, list(shape))
            y = convolution.convolution(x.detach(), *given, bias, *options)
            torch.testing.assert_close(y, dense.detach())
            g = torch.randn_like(dense)
            (gx,) = torch.autograd.grad(dense, x, g)
            got = convolution.grad_input(g, x.detach(), *given, *options)
            torch.testing.assert_close(got, gx)


@pytest.mark.parametrize("name", [n for n in EVERY if n not in TORCHAO])
def test_rows_of_each_matrix(name: str, kernels: None) -> None:
    """By one op what each matrix, which rests by itself, gives for its rows, bit for bit."""
    kind = Storage(name)
    for shape in ((4, 12, 64), (4, 6, 1024)):
        if kind.misfit(shape):
            continue
        codes, scales = weight(kind, *shape)
        stack = stowage.StowedTensor([codes, *scales], kind, shape, torch.float32)
        each = [lying_matrix(stack, e) for e in range(4)]
        if not library.storage_has_matrices(kind.key, shape):
            assert kind.block or None in each
            continue
        for transposed in (True, False):
            for dtype in COMPUTE:
                x = torch.randn(76, shape[2 if transposed else 1]).to(dtype)
                ends = [1, 1, 4, 73]
                y = library.grouped_rows(x, codes, scales, kind.key, shape, ends, transposed)
                assert not y[73:].any()
                for first, last, one in zip([0, *ends], ends, each, strict=False):
                    assert one is not None
                    parts, rows = (one._parts()[0], one._parts()[1:]), x[first:last]
                    if transposed:
                        found = library.linear(rows, *parts, one._storage.key, shape[1], None)
                    else:
                        found = library.linear_grad_input(rows, *parts, one._storage.key, shape[2])
                    assert torch.equal(y[first:last], found), (shape, transposed, dtype)


@pytest.mark.parametrize("ends", [[2, 1, 3], [1, 2, 7], [-1, 0, 2], [0, 0, 0], [9, 9, 9]])
def test_ends_are_those_of_slices(ends: list[int]) -> None:
    """As `x[a:b]` for each, where none begins before the one before it ends."""
    stack = stowage.quantize(torch.randn(3, 4, 64), "int8:row2")
    codes, *scales = stack._parts()
    x, wanted, last = torch.randn(6, 64), torch.zeros(6, 4), 0
    for expert, end in enumerate(ends):
        rows = slice(last, last := max(last, end))
        wanted[rows] = F.linear(x[rows], stack[expert])
    key = stack._storage.key
    assert torch.equal(library.grouped_rows(x, codes, scales, key, (3, 4, 64), ends, True), wanted)


@pytest.mark.parametrize(
    ("rows", "shape", "ends"), [(6, (3, 4, 32), [1, 2, 3]), (6, (3, 4, 64), [1, 2])]
)
def test_rows_that_do_not_fit(rows: int, shape: tuple[int, ...], ends: list[int]) -> None:
    stack = stowage.quantize(torch.randn(3, 4, 64), "int8:row2")
    codes, *scales = stack._parts()
    with pytest.raises(RuntimeError, match=r"^\[invalid_argument\] stowage::grouped_rows: x \[S"):
        key = stack._storage.key
        library.grouped_rows(torch.randn(rows, 64), codes, scales, key, shape, ends, True)


@pytest.mark.parametrize("name", [n for n in EVERY if n not in TORCHAO])
def test_grouped(name: str) -> None:
    kind, offsets = Storage(name), torch.tensor([0, 1, 5], dtype=torch.int32)
    for shape, transposed in (((3, 8, 33), True), ((3, 33, 8), False)):
        codes, scales = weight(kind, *shape)
        for dtype in COMPUTE:
            w = composite.dequantize(codes, scales, kind.key, shape, dtype)
            w = w.transpose(1, 2) if transposed else w
            x = torch.randn(6, 33).to(dtype)
            args = (codes, scales, kind.key, list(shape), offsets, transposed, False)
            y = grouped.grouped(x, *args)
            assert torch.equal(y[5:], torch.zeros_like(y[5:]))
            near(y[:1], x[:1], w[1])
            near(y[1:5], x[1:5], w[2])

# SPDX-License-Identifier: Apache-2.0
"""Stacks of matrices [E, K, O] that lie as [E, O, K]. The oracle is a weight that lies straight."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import stowage
from stowage._ops import composite, library
from stowage._ops.storage import Storage

STRAIGHT = ["mxfp4", "f4_e2m1:block32", "f4_e2m1:block16:bf16"]


def values(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.randn(3, 64, 40) * torch.tensor([1, 0.1, 7])[:, None, None]
    x[1, :32, 5] = 0
    return x.to(dtype)


def both(storage: str, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    x = values(dtype)
    straight = stowage.quantize(x.transpose(1, 2).contiguous(), storage)
    return stowage.quantize(x, f"{storage}:transposed"), straight


def same_parts(a: torch.Tensor, b: torch.Tensor) -> bool:
    pairs = zip(a.parts.values(), b.parts.values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("storage", STRAIGHT)
def test_it_has_the_parts_of_what_lies_and_the_values_of_its_transpose(
    storage: str, dtype: torch.dtype
) -> None:
    weight, straight = both(storage, dtype)
    assert weight.resting == f"{storage}:transposed"
    assert same_parts(weight, straight)
    for out in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(weight.dequantize(out), straight.dequantize(out).transpose(1, 2))


@pytest.mark.parametrize("storage", STRAIGHT)
def test_the_composite_has_the_same_bytes(storage: str) -> None:
    x, kind = values(torch.bfloat16), Storage(f"{storage}:transposed")
    codes, *scales = parts = library.quantize(x, kind.key)
    for got, want in zip(composite.quantize(x, kind.key), parts, strict=True):
        assert torch.equal(got, want)
    got = composite.dequantize(codes, scales, kind.key, x.shape, torch.float32)
    assert torch.equal(got, library.dequantize(codes, scales, kind.key, x.shape, torch.float32))
    ids = torch.tensor([2, 0, 2])
    got = composite.embedding(ids, codes, scales, kind.key, x.shape, torch.bfloat16)
    want = library.embedding(ids, codes, scales, kind.key, x.shape, torch.bfloat16)
    assert torch.equal(got, want)
    measured = [op(x, codes, scales, kind.key) for op in (composite.measure, library.measure)]
    torch.testing.assert_close(*measured, rtol=1e-12, atol=0)


def test_what_is_not_finite_is_told_where_the_caller_has_it() -> None:
    x = values()
    x[1, 2, 3] = float("inf")
    place = x.isfinite().logical_not().flatten().nonzero().item()
    for quantize in (library.quantize, composite.quantize):
        with pytest.raises(RuntimeError, match=f"got inf.* at element {place}"):
            quantize(x, Storage("mxfp4:transposed").key)


@pytest.mark.parametrize("storage", STRAIGHT)
def test_matrices_stay_stowed_and_multiply_as_those_that_lie(storage: str) -> None:
    weight, straight = both(storage)
    dense, x = weight.dequantize(), torch.randn(9, 64)
    stowage.fallbacks(clear=True)
    for e, matrix in enumerate(weight.unbind()):
        assert torch.equal(x @ weight[e], F.linear(x, straight[e]))
        assert torch.equal(x @ matrix, F.linear(x, straight[e]))
        assert torch.equal(weight[e - 3].dequantize(), dense[e])
    ends = torch.tensor([2, 2, 9], dtype=torch.int32)
    wanted = stowage.grouped_linear(x, straight, ends)
    assert torch.equal(F.grouped_mm(x, weight, offs=ends), wanted)
    assert torch.equal(weight[torch.tensor([2, -3])], dense[[2, 0]])
    assert torch.equal(weight[1:].dequantize(), dense[1:])
    assert same_parts(torch.cat([weight[:1], weight[1:]]), weight)
    assert stowage.fallbacks() == {}
    got = stowage.grouped_linear(x, weight.transpose(1, 2), ends)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_gradients_go_through_a_matrix() -> None:
    weight, _ = both("mxfp4")
    gradients = []
    for w in (weight, weight.dequantize()):
        x = torch.linspace(-1, 1, 128).view(2, 64).requires_grad_()
        gradients += torch.autograd.grad((x @ w[1]).square().sum(), x)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("storage", STRAIGHT)
@pytest.mark.parametrize(
    "at", [(1,), (slice(0, 2),), (0, 3), (slice(None), 5), (2, slice(0, 9), 7), (..., 39), ()]
)
def test_writes_requantize_what_they_change(storage: str, at: tuple[object, ...]) -> None:
    weight, straight = both(storage)
    with torch.no_grad():
        new = torch.randn_like(weight.dequantize()[at]) * 2
        weight[at] = new
        changed = straight.transpose(1, 2)
        changed[at] = new
    assert same_parts(weight, straight)


def test_copies_pickles_and_files_keep_it(tmp_path: Path) -> None:
    weight, _ = both("mxfp4", torch.bfloat16)
    room = io.BytesIO()
    torch.save(weight, room)
    room.seek(0)
    for other in (copy.deepcopy(weight), weight.clone(), torch.load(room), weight.detach()):
        assert other.resting == weight.resting and same_parts(other, weight)
    module = nn.Module()
    module.experts = nn.Parameter(weight, False)
    stowage.save(module, tmp_path / "m")
    again = nn.Module()
    again.experts = nn.Parameter(torch.empty(3, 64, 40, dtype=torch.bfloat16))
    stowage.load(again, tmp_path / "m")
    assert again.experts.resting == weight.resting and same_parts(again.experts, weight)


@pytest.mark.parametrize("shape", [(64, 40), (2, 40, 64), (2, 2, 32, 8)])
def test_shapes_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        stowage.InvalidArgument, match="must have 3 dimensions, the second a multiple of 32, got"
    ):
        stowage.quantize(torch.zeros(shape), "mxfp4:transposed")

# SPDX-License-Identifier: Apache-2.0
"""What code for torchao's NF4Tensor relies on, asked of torchao and of the facade in one process:
each call gives the same answer, or is one of the differences that docs/compat.md names."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from stowage.compat.torchao import quantization as ours
from stowage.compat.torchao.dtypes import nf4tensor as our_paths

theirs = pytest.importorskip("torchao.quantization")
PARTS = our_paths._INNER_TENSOR_NAMES_FOR_SHARDING
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Call = Callable[[Any], Any]


def weight(dtype: torch.dtype = torch.float32, count: int = 512 * 512) -> torch.Tensor:
    """On a lattice, where both sides sum scales exactly."""
    rng = torch.Generator().manual_seed(0)
    return ((torch.randn(count, generator=rng) * 32).round() / 32).to(dtype)


def both(x: torch.Tensor, *sizes: int) -> tuple[Any, Any]:
    return ours.to_nf4(x, *sizes), theirs.to_nf4(x, *sizes)


def told(side: Any, answer: Any) -> Any:
    """What of an answer must be equal on both sides."""
    if isinstance(answer, side.NF4Tensor):
        parts = [getattr(answer, name).reshape(-1).tolist() for name in PARTS]
        return "NF4Tensor", answer.shape, answer.dtype, answer.block_size, parts
    if isinstance(answer, torch.Tensor):
        return type(answer).__name__, answer.shape, answer.dtype, answer.tolist()
    if isinstance(answer, list | tuple):
        return [told(side, one) for one in answer]
    return answer


def a_parameter(t: Any) -> Any:
    return nn.Parameter(t, requires_grad=False)


def saved(t: Any) -> Any:
    file = io.BytesIO()
    torch.save({"w": t}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["w"]


CALLS: dict[str, Call] = {
    "to float32": lambda t: t.to(torch.float32),
    "to bfloat16": lambda t: t.to(torch.bfloat16),
    "to float16 by name": lambda t: t.to(dtype=torch.float16),
    "to a device and dtype": lambda t: t.to("cpu", torch.float32),
    "to a device": lambda t: t.to("cpu"),
    "cpu": lambda t: t.cpu(),
    "chunk": lambda t: torch.chunk(t, 2),
    "split": lambda t: torch.split(t, t.shape[0] // 4),
    "the whole slice": lambda t: t[: t.shape[0]],
    "view(-1)": lambda t: t.view(-1),
    "view of its shape": lambda t: t.view(512, 512),
    "detach": lambda t: t.detach(),
    "as_strided": lambda t: torch.as_strided(t, t.size(), t.stride(), t.storage_offset()),
    "a parameter": lambda t: a_parameter(t).detach(),
    "saved": saved,
    "values": lambda t: t.get_original_weight(),
    "sizes": lambda t: (t.block_size, t.scaler_block_size, t.n_blocks, t.dim(), t.numel()),
    "pinned": lambda t: t.is_pinned(),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_answers(name: str, dtype: torch.dtype) -> None:
    mine, peer = both(weight(dtype).view(512, 512))
    assert told(ours, CALLS[name](mine)) == told(theirs, CALLS[name](peer))


def test_values_by_the_class() -> None:
    mine, peer = both(weight())
    values = ours.NF4Tensor.get_original_weight(mine)
    assert torch.equal(values, theirs.NF4Tensor.get_original_weight(peer))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(16, 1), (16, 2), (64, 1), (32, 2), (64, 256)])
def test_same_parts_for_all_block_sizes(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    x = weight(dtype, 2 * math.prod(sizes) * 64)
    for shape in ((-1,), (64, -1)):
        mine, peer = both(x.view(shape), *sizes)
        assert told(ours, mine) == told(theirs, peer)
        assert torch.equal(mine.get_original_weight(), peer.get_original_weight())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [16, 32])
def test_same_products(block: int, dtype: torch.dtype) -> None:
    mine, peer = both(weight(dtype, 32 * 32).view(32, 32), block, 2)
    x = torch.randn(3, 32, dtype=dtype)
    close = dict(rtol=2e-2, atol=8e-2) if dtype is not torch.float32 else dict(rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        nn.functional.linear(x, mine), nn.functional.linear(x, peer), **close
    )
    torch.testing.assert_close(
        our_paths.linear_nf4(x, mine), nn.functional.linear(x, peer), **close
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", [(32, 2), (64, 1), None])
def test_a_whole_write_makes_every_scale_anew(source: Any, dtype: torch.dtype) -> None:
    """A row that keeps its values, and values beyond the old range, do not hold the others back."""
    before, after = weight(dtype, 128), weight(dtype, 256)[128:] * 8
    after[:64] = before[:64]
    results = []
    for side in (ours, theirs):
        target = side.to_nf4(before, 64, 1)
        target.copy_(after if source is None else side.to_nf4(after, *source))
        results.append(told(side, target))
    assert results[0] == results[1]


def test_a_parameter_stays_at_rest_and_torchao_makes_it_dense() -> None:
    """The difference that is meant: module.to(dtype) must not make a model four times as large."""
    mine, peer = (a_parameter(t) for t in both(weight().view(512, 512)))
    assert type(peer.to(torch.float32)) is torch.Tensor
    assert isinstance(mine.to(torch.bfloat16), ours.NF4Tensor)
    layer = nn.Linear(512, 512, bias=False)
    layer.weight = mine
    layer.to(torch.bfloat16)
    assert isinstance(layer.weight, ours.NF4Tensor) and layer.weight.dtype is torch.bfloat16
    assert type(layer.state_dict()["weight"].to(torch.bfloat16)) is torch.Tensor


def test_new_zeros_are_zeros_and_torchao_makes_nan() -> None:
    """torchao sets the parts to 0, which decodes to 0 / 0."""
    mine, peer = both(weight().view(512, 512))
    assert peer.new_zeros((256, 512)).get_original_weight().isnan().all()
    zeros = mine.new_zeros((256, 512))
    assert torch.equal(zeros, torch.zeros(256, 512)) and type(zeros) is torch.Tensor


REFUSED: dict[str, Call] = {  # by torchao, with NotImplementedError
    "a step": lambda t: t[::2],
    "a part of the rows": lambda t: t[1:],
    "a part of the columns": lambda t: t[:, :511],
    "a view by its size": lambda t: t.view(512 * 512),
    "new zeros of another size": lambda t: t.new_zeros((513, 512)),
    "strides": lambda t: torch.as_strided(t, (512, 512), (1, 512), 0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torchao_refuses_is_right_here(name: str) -> None:
    mine, peer = both(weight().view(512, 512))
    with pytest.raises(NotImplementedError):
        REFUSED[name](peer)
    assert torch.equal(REFUSED[name](mine) + 0, REFUSED[name](mine.get_original_weight()))


@pytest.mark.parametrize("shape", [(511, 512), (511 * 512,), (8, 128, 128)])
def test_shapes_are_refused_by_both(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    with pytest.raises(AssertionError):
        theirs.to_nf4(x)
    with pytest.raises(ValueError, match=r"multiple of 16384|at most 2 dimensions"):
        ours.to_nf4(x)


@pytest.mark.parametrize("block", [8, 48, 8192])
def test_other_sizes_of_blocks_are_refused(block: int) -> None:
    x = torch.randn(block * 16)
    assert theirs.to_nf4(x, block, 2).block_size == block
    with pytest.raises(ValueError, match="a power of two from 32 to 4096, for nf4:torchao from 16"):
        ours.to_nf4(x, block, 2)

# SPDX-License-Identifier: Apache-2.0
"""What a forward with gradients keeps: codes and scales, never the dequantized weight."""

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import stowage

SIZE, MIB = 4096, 1 << 20


@pytest.fixture(scope="module")
def values() -> Tensor:
    return torch.randn(SIZE, SIZE)


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


def held(output: Tensor) -> int:
    """Bytes of the tensors that a graph keeps, each memory once."""
    found: dict[int, int] = {}
    nodes, seen = [output.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [before for before, _ in node.next_functions]
        for tensor in getattr(node, "saved_tensors", ()):
            parts = tensor.parts.values() if isinstance(tensor, stowage.StowedTensor) else [tensor]
            for part in parts:
                found[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
    return sum(found.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("storage", ["f8_e4m3:row", "int8", "nf4", "nf4:block64:nested"])
def test_a_linear_holds_codes_and_scales(values: Tensor, storage: str, dtype: torch.dtype) -> None:
    layer = nn.Linear(8, 8, dtype=dtype)
    weight = stowage.quantize(values, storage, compute_dtype=dtype)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.bias = nn.Parameter(torch.zeros(SIZE, dtype=dtype))
    x = torch.randn(16, SIZE, dtype=dtype, requires_grad=True)
    layer(x).sum().backward()  # scratch and threads are there from now on
    gc.collect()
    before = anonymous_bytes()
    y = layer(x)
    grown = anonymous_bytes() - before
    assert weight.nbytes_at_rest <= held(y) <= weight.nbytes_at_rest + MIB
    assert grown <= y.nbytes + MIB
    y.sum().backward()


def test_reads_through_views_hold_no_dense_weight() -> None:
    weight = stowage.quantize(torch.randn(SIZE, 256), "int8")
    x = torch.randn(4, 256, requires_grad=True)
    y = torch.matmul(x[None], weight.t()) + nn.functional.linear(x, weight[: SIZE // 2]).sum()
    assert held(y) <= weight.nbytes_at_rest + MIB // 4


def test_an_aliasing_write_copies_no_more_than_the_weight() -> None:
    weight = stowage.quantize(torch.randn(64, 64), "nf4")
    codes = weight.parts["codes"]
    address = codes.data_ptr()
    weight[3].zero_()
    assert weight.parts["codes"] is codes and codes.data_ptr() == address

# SPDX-License-Identifier: Apache-2.0
"""Shapes and dtypes of the ops' results, for torch.compile, torch.export and meta tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stowage._ops import shapes
from stowage._ops.storage import Storage


@torch.library.register_fake("stowage::quantize")
def _quantize(x: Tensor, storage: int, keep_nonfinite: bool = False) -> list[Tensor]:
    kind = Storage.from_key(storage).for_values(x.dtype)
    shapes.check_quantize(x, kind)
    return [x.new_empty(shape, dtype=dtype) for _, dtype, shape in kind.layout(x.shape)]


@torch.library.register_fake("stowage::dequantize")
def _dequantize(
    codes: Tensor, scales: Sequence[Tensor], storage: int, shape: Sequence[int], out: torch.dtype
) -> Tensor:
    where = "stowage::dequantize"
    shapes.check_weight(where, Storage.from_key(storage), shape, codes, scales, out)
    return codes.new_empty(tuple(shape), dtype=out)


@torch.library.register_fake("stowage::linear")
def _linear(
    x: Tensor,
    codes: Tensor,
    scales: Sequence[Tensor],
    storage: int,
    rows: int,
    bias: Tensor | None,
    exact: bool = False,
) -> Tensor:
    shapes.check_linear(x, codes, scales, Storage.from_key(storage), rows, bias)
    return x.new_empty((*x.shape[:-1], rows))


@torch.library.register_fake("stowage::linear_grad_input")
def _linear_grad_input(
    g: Tensor,
    codes: Tensor,
    scales: Sequence[Tensor],
    storage: int,
    columns: int,
    exact: bool = False,
) -> Tensor:
    kind = Storage.from_key(storage)
    shapes.check_linear_grad_input(g, codes, scales, kind, columns)
    return g.new_empty((*g.shape[:-1], columns))


@torch.library.register_fake("stowage::embedding")
def _embedding(
    ids: Tensor,
    codes: Tensor,
    scales: Sequence[Tensor],
    storage: int,
    shape: Sequence[int],
    out: torch.dtype,
    tile: bool = False,
) -> Tensor:
    kind = Storage.from_key(storage)
    shapes.check_embedding(ids, codes, scales, kind, shape, out)
    return codes.new_empty((*ids.shape, *shape[1:]), dtype=out, device=ids.device)


@torch.library.register_fake("stowage::amax")
def _amax(values: Sequence[Tensor]) -> Tensor:
    shapes.check_amax(values)
    where = values[0].device if values else "cpu"
    return torch.empty(len(values), dtype=torch.float32, device=where)


@torch.library.register_fake("stowage::measure")
def _measure(x: Tensor, codes: Tensor, scales: Sequence[Tensor], storage: int) -> Tensor:
    shapes.check_measure(x, codes, scales, Storage.from_key(storage))
    return torch.empty(8, dtype=torch.float64)

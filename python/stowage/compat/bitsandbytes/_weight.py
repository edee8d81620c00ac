# SPDX-License-Identifier: Apache-2.0
"""Packed codes with their QuantState, as what our ops take: codes, scales, storage, shape."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stowage._ops import library
from stowage._ops.errors import InvalidArgument, Unsupported, translated
from stowage._ops.storage import NESTED_BLOCK, Storage
from stowage._tensor import autograd

BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Weight(NamedTuple):
    """Shares the memory of the tensors that it was made from."""

    codes: Tensor
    scales: list[Tensor]
    key: int  # of the storage
    shape: tuple[int, ...]


@torch.compiler.assume_constant_result
def storage_key(quant_type: Any, blocksize: Any, nested: bool) -> int:
    """Raises InvalidArgument for a type or block that bitsandbytes has not."""
    if blocksize not in BLOCKS:
        raise InvalidArgument(f"stowage: blocksize must be one of {BLOCKS}, got {blocksize}")
    if quant_type not in ("nf4", "fp4"):
        raise InvalidArgument(f"stowage: quant_type must be 'nf4' or 'fp4', got {quant_type!r}")
    return Storage(f"{quant_type}:block{blocksize}{':nested' if nested else ''}").key


def weight_of(packed: Tensor, state: Any) -> Weight:
    """`packed`: codes of any dtype that is a view of bytes. `state`: a QuantState, ours or that of
    bitsandbytes. Raises InvalidArgument where they do not belong together."""
    if state is None:
        raise InvalidArgument("stowage: quant_state must be given, got None")
    if getattr(state, "packing_format_for_cpu", False):
        raise InvalidArgument(
            "stowage: packed codes must be in file order, got those that bitsandbytes has "
            "rearranged for its own CPU kernel; take them from state_dict() of its layer"
        )
    codes = packed.detach().contiguous().view(-1)
    if codes.dtype is not torch.uint8:
        codes = codes.view(torch.uint8)
    shape = tuple(state.shape)
    size = (math.prod(shape) + 1) // 2
    if codes.numel() < size:
        raise InvalidArgument(
            f"stowage: packed codes of {list(shape)} must be {size} bytes, got {codes.numel()}"
        )
    key = storage_key(state.quant_type, state.blocksize, state.nested)
    return Weight(codes[:size].view(-1, 1), _scales(state), key, shape)


def _scales(state: Any) -> list[Tensor]:
    if not state.nested:
        return [state.absmax.reshape(-1).float()]
    inner = state.state2
    if inner.blocksize != NESTED_BLOCK:
        raise Unsupported(
            f"stowage: blocks of nested scales must be {NESTED_BLOCK}, got {inner.blocksize}"
        )
    second, table = inner.absmax.reshape(-1).float(), inner.code.reshape(-1).float()
    offset = state.offset.reshape(()).float()
    return [state.absmax.reshape(-1), second, table.to(second.device), offset.to(second.device)]


def dequantized(weight: Weight, dtype: torch.dtype) -> Tensor:
    codes, scales, key, shape = weight
    try:
        return library.dequantize(codes, scales, key, shape, dtype)
    except RuntimeError as error:
        raise translated(error) from None


def product(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """x W^T + bias in the dtype of x, with gradients to x and bias."""
    codes, scales, key, shape = weight
    if len(shape) != 2:
        raise InvalidArgument(f"stowage: a product needs a matrix, got a weight {list(shape)}")
    try:
        return autograd.linear(x, codes, scales, key, shape[0], bias)
    except RuntimeError as error:
        raise translated(error) from None


def product_of_transposed(x: Tensor, weight: Weight) -> Tensor:
    """x W, with gradients to x."""
    codes, scales, key, shape = weight
    try:
        return autograd.linear_grad_input(x, codes, scales, key, shape[1])
    except RuntimeError as error:
        raise translated(error) from None


def rows(ids: Tensor, weight: Weight, dtype: torch.dtype) -> Tensor:
    """The rows `ids` of the weight, rounded to `dtype`."""
    codes, scales, key, shape = weight
    try:
        return library.embedding(ids, codes, scales, key, shape, dtype)
    except RuntimeError as error:
        raise translated(error) from None

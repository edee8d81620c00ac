# SPDX-License-Identifier: Apache-2.0
"""`bitsandbytes.functional`, as far as it concerns 4-bit weights and their nested scales."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from stowage._ops import library
from stowage._ops.errors import InvalidArgument, Unsupported, translated
from stowage._ops.numbers import four_bit
from stowage._ops.storage import NESTED_BLOCK, Storage
from stowage.compat.bitsandbytes import _weight
from stowage.compat.bitsandbytes._maps import create_dynamic_map
from stowage.compat.bitsandbytes._peer import forwarded, peers
from stowage.compat.bitsandbytes._state import QuantState

_PEERS = frozenset(
    {
        "create_linear_map",
        "create_normal_map",
        "create_fp8_map",
        "has_avx512bf16",
        "igemm",
        "batched_igemm",
        "int8_double_quant",
        "int8_linear_matmul",
        "int8_mm_dequant",
        "int8_vectorwise_dequant",
        "int8_vectorwise_quant",
        "optimizer_update_32bit",
        "optimizer_update_8bit_blockwise",
        "is_on_gpu",
        "get_ptr",
    }
)
_Packed = tuple[Tensor, QuantState]


def __getattr__(name: str) -> Any:
    return forwarded("bitsandbytes.functional", _PEERS, name)


# --- tables -------------------------------------------------------------------------------------


def get_4bit_type(typename: str, device: Any = None, blocksize: int = 64) -> Tensor:
    """The 16 values of "nf4" or "fp4" by code, fp32; other names are asked of bitsandbytes. Without
    `device` the table is on the current accelerator, if there is one."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if typename not in QuantState.valid_quant_types:
        return peers("bitsandbytes.functional", "get_4bit_type")(typename, device, blocksize)
    return torch.tensor(Storage(typename).values, dtype=torch.float32, device=device)


# --- 4-bit codes --------------------------------------------------------------------------------


def quantize_4bit(
    A: Tensor,
    absmax: Tensor | None = None,
    out: Tensor | None = None,
    blocksize: int | None = None,
    compress_statistics: bool = False,
    quant_type: str = "fp4",
    quant_storage: torch.dtype = torch.uint8,
) -> _Packed:
    """Packed codes, [bytes / size of quant_storage, 1], and the state that decodes them. Blocks of
    `blocksize` (64) values run over the flat tensor, of any shape. NaN and infinity are kept,
    unless `compress_statistics`, which refuses them. `absmax` and `out` are filled if given.

    Raises InvalidArgument (a ValueError) for other dtypes than fp32, fp16, bf16.
    """
    nested, block = bool(compress_statistics), 64 if blocksize is None else blocksize
    key = _weight.storage_key(quant_type, block, nested)
    if A.dtype not in _weight.DTYPES:
        raise InvalidArgument(f"stowage: A must be float32, float16 or bfloat16, got {A.dtype}")
    try:
        codes, *scales = library.quantize(A.detach().contiguous(), key, not nested)
    except RuntimeError as error:
        raise translated(error) from None
    state = QuantState(
        scales[0], A.shape, get_4bit_type(quant_type, A.device), block, quant_type, A.dtype
    )
    if nested:
        _, second, table, state.offset = scales
        state.state2 = QuantState(second, code=table, blocksize=NESTED_BLOCK, dtype=torch.float32)
        state.nested = True
    if absmax is not None:
        state.absmax = absmax.copy_(state.absmax)
    packed = _stored_as(codes, quant_storage)
    return packed if out is None else out.copy_(packed), state


def _stored_as(codes: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype is torch.uint8:
        return codes
    if codes.numel() % dtype.itemsize:
        raise InvalidArgument(
            f"stowage: quant_storage must divide {codes.numel()} bytes, got {dtype}"
        )
    return codes.view(-1).view(dtype).view(-1, 1)


def dequantize_4bit(
    A: Tensor,
    quant_state: QuantState | None = None,
    absmax: Tensor | None = None,
    out: Tensor | None = None,
    blocksize: int | None = None,
    quant_type: str = "fp4",
) -> Tensor:
    """The values of packed codes `A` in the shape and dtype of the state; without a state, of
    `out`, with `absmax` as plain scales. Codes given as a row, [1, bytes], give the transpose.
    Raises InvalidArgument without a state, `absmax` and `out`."""
    if quant_state is None:
        if absmax is None or out is None:
            raise InvalidArgument(
                "stowage: absmax and out must be given to dequantize_4bit without quant_state"
            )
        block = 64 if blocksize is None else blocksize
        quant_state = QuantState(absmax, out.shape, None, block, quant_type, out.dtype)
    values = _weight.dequantized(_weight.weight_of(A, quant_state), quant_state.dtype)
    if out is not None:
        values = out.copy_(values)
    return values.t() if A.dim() == 2 and A.shape[0] == 1 < A.shape[1] else values


def quantize_nf4(
    A: Tensor,
    absmax: Tensor | None = None,
    out: Tensor | None = None,
    blocksize: int | None = None,
    compress_statistics: bool = False,
    quant_storage: torch.dtype = torch.uint8,
) -> _Packed:
    """`quantize_4bit` to nf4."""
    return quantize_4bit(A, absmax, out, blocksize, compress_statistics, "nf4", quant_storage)


def quantize_fp4(
    A: Tensor,
    absmax: Tensor | None = None,
    out: Tensor | None = None,
    blocksize: int | None = None,
    compress_statistics: bool = False,
    quant_storage: torch.dtype = torch.uint8,
) -> _Packed:
    """`quantize_4bit` to fp4."""
    return quantize_4bit(A, absmax, out, blocksize, compress_statistics, "fp4", quant_storage)


def dequantize_nf4(
    A: Tensor,
    quant_state: QuantState | None = None,
    absmax: Tensor | None = None,
    out: Tensor | None = None,
    blocksize: int | None = None,
) -> Tensor:
    """`dequantize_4bit` of nf4."""
    return dequantize_4bit(A, quant_state, absmax, out, blocksize, "nf4")


def dequantize_fp4(
    A: Tensor,
    quant_state: QuantState | None = None,
    absmax: Tensor | None = None,
    out: Tensor | None = None,
    blocksize: int | None = None,
) -> Tensor:
    """`dequantize_4bit` of fp4."""
    return dequantize_4bit(A, quant_state, absmax, out, blocksize, "fp4")


# --- 8-bit codes of a table ---------------------------------------------------------------------


def quantize_blockwise(
    A: Tensor,
    code: Tensor | None = None,
    absmax: Tensor | None = None,
    out: Tensor | None = None,
    blocksize: int = 4096,
    nested: bool = False,
) -> _Packed:
    """8-bit codes of `A`, in its shape, by the ascending table `code` (the dynamic map), and the
    state that decodes them: what block scales become in nested storages. Raises InvalidArgument
    for values that are not floating and a `blocksize` below 1."""
    if blocksize <= 0 or A.dtype not in _weight.DTYPES:
        raise InvalidArgument(
            "stowage: blocksize must be positive and A float32, float16 or bfloat16, got "
            f"{blocksize} and {A.dtype}"
        )
    table = (create_dynamic_map() if code is None else code).to(A.device, torch.float32, copy=True)
    codes, scales = four_bit.quantize_blockwise(A.detach(), four_bit.points(table), blocksize)
    state = QuantState(scales, code=table, blocksize=blocksize, dtype=A.dtype)
    if nested:
        offset = scales.mean()
        state.absmax, second = quantize_blockwise(scales - offset, blocksize=blocksize)
        state.offset, state.state2, state.nested = offset, second, True
    if absmax is not None:
        state.absmax = absmax.copy_(state.absmax)
    return codes if out is None else out.copy_(codes), state


def dequantize_blockwise(
    A: Tensor,
    quant_state: QuantState | None = None,
    absmax: Tensor | None = None,
    code: Tensor | None = None,
    out: Tensor | None = None,
    blocksize: int = 4096,
    nested: bool = False,
) -> Tensor:
    """The values of 8-bit codes, in the dtype of the state; without one, fp32 by `absmax`. Raises
    InvalidArgument without either, and for codes that are not uint8."""
    if quant_state is None:
        if absmax is None:
            raise InvalidArgument("stowage: absmax or quant_state must be given, got neither")
        table = create_dynamic_map() if code is None else code
        quant_state = QuantState(absmax, code=table, blocksize=blocksize, dtype=torch.float32)
    if A.dtype is not torch.uint8:
        raise InvalidArgument(f"stowage: A must be codes in uint8, got {A.dtype}")
    state = quant_state
    scales = state.absmax
    if state.nested:
        scales = dequantize_blockwise(scales, state.state2) + state.offset
    table = state.code.to(A.device, torch.float32)
    values = four_bit.dequantize_blockwise(A, scales, table, state.blocksize, state.dtype)
    return values if out is None else out.copy_(values)


# --- products -----------------------------------------------------------------------------------


def gemv_4bit(
    A: Tensor,
    B: Tensor,
    out: Tensor | None = None,
    transposed_A: bool = False,
    transposed_B: bool = False,
    state: QuantState | None = None,
) -> Tensor:
    """A W^T for any number of rows; `transposed_A` and `transposed_B` have no effect, as there."""
    result = _weight.product(A, _weight.weight_of(B, state), None)
    return result if out is None else out.copy_(result)


def matmul_4bit(
    A: Tensor,
    B: Tensor,
    quant_state: QuantState,
    out: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """A W^T + bias in the dtype of A, with gradients to A and bias, W being the matrix of the codes
    `B`. A matrix [in, out] that only fits the other way round is taken so, with a warning."""
    weight = _weight.weight_of(B, quant_state)
    if len(weight.shape) == 2 and weight.shape[0] == A.shape[-1] != weight.shape[1]:
        warnings.warn(
            f"matmul_4bit: the weight must be [out, in], got {list(weight.shape)} for an input of "
            f"{A.shape[-1]} columns: it was taken as [in, out]",
            DeprecationWarning,
            stacklevel=2,
        )
        result = _weight.product_of_transposed(A, weight)
        result = result if bias is None else result + bias
    else:
        result = _weight.product(A, weight, bias)
    return result if out is None else out.copy_(result)


def _convert_weight_packed_for_cpu(*args: Any, **kwargs: Any) -> Any:
    raise Unsupported(
        "stowage: codes rest in file order and are never rearranged in place; call "
        "matmul_4bit or a Linear4bit with them as they are"
    )


_convert_weight_packed_for_cpu_inverse = _convert_weight_packed_for_cpu

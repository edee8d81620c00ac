# SPDX-License-Identifier: Apache-2.0
"""`stowage.quantize`: from a plain tensor to a stowed one."""

import torch
from torch import Tensor

from stowage._ops import library
from stowage._ops.errors import InvalidArgument, translated
from stowage._ops.storage import Storage
from stowage._tensor.stowed import StowedTensor, wrap
from stowage._tensor.views import PACKED


def quantize(
    tensor: Tensor,
    storage: str | Storage,
    *,
    compute_dtype: torch.dtype | None = None,
    exact: bool = False,
    keep_nonfinite: bool = False,
) -> StowedTensor:
    """A stowed tensor of these values on the same device; `tensor` is neither changed nor kept.

    Args:
        tensor: floating values of any shape that the storage can hold.
        storage: how they rest: "f8_e4m3:row", "int8", "nf4:block64:nested", ...
        compute_dtype: what a reader sees and products compute in; without, the dtype of `tensor`.
        exact: products are bit-equal to those of the dequantized weight (slower for few rows).
        keep_nonfinite: casts, nf4 and fp4 keep NaN and infinities instead of refusing them.

    Returns:
        The weight, of the shape of `tensor`.

    Raises:
        InvalidArgument: an unknown storage, a shape or dtype that it cannot hold, or values that
            are not finite.

    Example:
        >>> weight = stowage.quantize(torch.randn(128, 64), "f8_e4m3:row")
        >>> torch.nn.functional.linear(torch.randn(3, 64), weight).shape
        torch.Size([3, 128])
    """
    kind = Storage(storage)
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise InvalidArgument(f"stowage.quantize: tensor must be floating, got {got}")
    dtype = compute_dtype or tensor.dtype
    if not dtype.is_floating_point:
        raise InvalidArgument(f"stowage.quantize: compute_dtype must be floating, got {dtype}")
    values = tensor.detach()
    if isinstance(values, PACKED):
        values = values.dequantize(torch.float32)
    try:
        kind = kind.for_values(values.dtype)
        parts = library.quantize(values.contiguous(), kind.key, keep_nonfinite)
    except RuntimeError as error:
        raise translated(error) from None
    return wrap(parts, kind, tuple(values.shape), dtype, exact)

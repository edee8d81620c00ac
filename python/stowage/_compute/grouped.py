# SPDX-License-Identifier: Apache-2.0
"""Grouped products of expert weights: each group of rows times an expert of its own, which stays
stowed. No other expert is read, and no graph keeps a dequantized one."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stowage._errors import InvalidArgument
from stowage.registry import function
from stowage.tensor import StowedTensor
from stowage.views import StowedView

aten = torch.ops.aten
_compiling = torch.compiler.is_compiling


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor | Sequence[int],
    bias: Tensor | None = None,
) -> Tensor:
    """Rows of `x` [S, K], sorted by expert, each times its expert's matrix of `weight` [E, O, K].

    `offsets` [E]: where each expert's rows end, ascending, as torch's grouped_mm takes them; rows
    behind the last end are zeros in the result [S, O]. `bias` [E, O] is added by expert. The values
    and gradients are those of F.linear with each expert. Not for compiled graphs, whose shapes must
    not depend on values. Raises InvalidArgument (a ValueError) for shapes and dtypes that do not
    fit.
    """
    where = "stowage.grouped_linear"
    if weight.dim() != 3 or x.dim() != 2 or x.shape[1] != weight.shape[2]:
        raise InvalidArgument(
            f"{where}: x must be [S, K] and weight [E, O, K], got {list(x.shape)} and "
            f"{list(weight.shape)}"
        )
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise InvalidArgument(f"{where}: x must be {weight.dtype} like weight, got {x.dtype}")
    if bias is not None and bias.shape != weight.shape[:2]:
        raise InvalidArgument(
            f"{where}: bias must be {list(weight.shape[:2])}, got {list(bias.shape)}"
        )
    ends = offsets.tolist() if isinstance(offsets, Tensor) else list(offsets)
    rising = all(a <= b for a, b in zip([0, *ends], [*ends, len(x)], strict=True))
    if len(ends) != len(weight) or not rising:
        raise InvalidArgument(
            f"{where}: offsets must be {len(weight)} ends that ascend from 0 to {len(x)}, "
            f"got {ends}"
        )
    return _product(x, weight, ends, bias, transposed=True)


def _product(
    x: Tensor, weight: Tensor, ends: Sequence[int], bias: Tensor | None, transposed: bool
) -> Tensor:
    """x W^T or x W by groups, for plain weights as well."""
    pieces, start = [], 0
    for expert, end in enumerate(ends):
        if end > start:
            rows, w = x[start:end], weight[expert]
            if transposed:
                pieces.append(F.linear(rows, w, None if bias is None else bias[expert]))
            else:
                pieces.append(rows @ w)
        start = max(start, end)
    columns = weight.shape[1] if transposed else weight.shape[2]
    if start < len(x) or not pieces:
        dtype = pieces[0].dtype if pieces else x.dtype
        pieces.append(x.new_zeros((len(x) - start, columns), dtype=dtype))
    return torch.cat(pieces)


def _experts(t: Any) -> tuple[StowedTensor, bool] | None:
    """The stowed [E, O, K] that `t` is, or whose matrices it shows transposed, and which."""
    if type(t) is StowedTensor:
        return (t, False) if t.dim() == 3 else None
    if type(t) is not StowedView or len(t._chain) != 1 or t.dim() != 3:
        return None
    step = t._chain[0]
    swaps = step.op is aten.transpose.int and {d % 3 for d in step.args} == {1, 2}
    return (t._weight, True) if swaps else None


@function(torch._grouped_mm)
def _grouped_mm(
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """What F.grouped_mm, and transformers' experts by it, call."""
    found = _experts(right)
    if found is None or offs is None or bias is not None or _compiling():
        return NotImplemented
    weight, transposed = found
    if type(left) is not Tensor or left.dim() != 2 or out_dtype not in (None, weight.dtype):
        return NotImplemented
    if left.dtype is not weight.dtype or left.shape[1] != right.shape[1]:
        return NotImplemented
    return _product(left, weight, offs.tolist(), None, transposed)

# SPDX-License-Identifier: Apache-2.0
"""Products with a resting weight: as the dispatcher sees them, inside a block, and without it.

In a block the product is the one that the op itself would ask torch for, on the weight that the
block has widened, so a block changes no bit. Exact ones follow torch in what strides do, too.

register_autograd puts a Python function above an op: outside inference_mode it costs 7 us a call,
more than a small product. Where x is a dense CPU tensor and no mode, transform, tracer or profiler
is active, going straight to the CPU kernel (`linear_direct`) is the same call; anything else takes
the usual way.

Autocast is followed below the point where it acts: which casts are its own, and operators inside
which it goes on acting, as torch's bilinear casts not its arguments but the products it is made of.

"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stowage._ops import _torch, library
from stowage._tensor.products.blocks import widened
from stowage._tensor.stowed import StowedTensor
from stowage._tensor.tables import op
from stowage._tensor.views import PACKED, StowedView

_stock_linear = _torch.linear
CPU = _torch.DispatchKeySet(_torch.DispatchKey.CPU)
_redispatch_linear = _torch.handle(library.linear).redispatch_boxed
linear_one_scale = _torch.handle(torch.ops.stowage._linear.default).redispatch_boxed
_redispatch_linear_grad_input = _torch.handle(library.linear_grad_input).redispatch_boxed
aten = torch.ops.aten


def strides_count(x: Tensor) -> bool:
    """Whether torch's product with x, or its gradient, may take another way than with a contiguous
    one, and other roundings with it. Only exact weights care."""
    return not x.is_contiguous()


def linear_in_block(
    x: Tensor, codes: Tensor, scales: Sequence[Tensor], storage: int, rows: int, bias: Tensor | None
) -> Tensor | None:
    """x W^T + bias inside a block, else None."""
    if codes.device != x.device:
        return None
    w = widened(codes, scales, storage, (rows, x.shape[-1]), x.dtype)
    return None if w is None else _stock_linear(x, w, bias)


def grad_input_in_block(
    g: Tensor, codes: Tensor, scales: Sequence[Tensor], storage: int, columns: int
) -> Tensor | None:
    """g W inside a block, or where its strides choose torch's kernel (see `strides_count`), else
    None."""
    if codes.device != g.device:
        return None
    shape = (g.shape[-1], columns)
    w = widened(codes, scales, storage, shape, g.dtype)
    if w is None and g.dim() == 2 and strides_count(g):
        w = library.dequantize(codes, scales, storage, shape, g.dtype)
    return None if w is None else g.reshape(-1, g.shape[-1]).mm(w).view(*g.shape[:-1], columns)


def linear(
    x: Tensor,
    codes: Tensor,
    scales: Sequence[Tensor],
    storage: int,
    rows: int,
    bias: Tensor | None,
    exact: bool,
) -> Tensor:
    """x W^T + bias."""
    y = linear_in_block(x, codes, scales, storage, rows, bias) if exact else None
    return library.linear(x, codes, scales, storage, rows, bias, exact) if y is None else y


def linear_grad_input(
    g: Tensor, codes: Tensor, scales: Sequence[Tensor], storage: int, columns: int, exact: bool
) -> Tensor:
    """g W."""
    gx = grad_input_in_block(g, codes, scales, storage, columns) if exact else None
    return (
        library.linear_grad_input(g, codes, scales, storage, columns, exact) if gx is None else gx
    )


def linear_direct(
    x: Tensor,
    codes: Tensor,
    scales: Sequence[Tensor],
    storage: int,
    rows: int,
    bias: Tensor | None,
    exact: bool,
) -> Tensor:
    """ops.linear for an unseen x; no gradient flows."""
    if len(scales) == 1 and not exact:
        return linear_one_scale(CPU, x, codes, scales[0], storage, rows, bias)
    if exact:
        y = linear_in_block(x, codes, scales, storage, rows, bias)
        if y is not None:
            return y
    return _redispatch_linear(CPU, x, codes, scales, storage, rows, bias, exact)


def linear_grad_input_direct(
    g: Tensor, codes: Tensor, scales: Sequence[Tensor], storage: int, columns: int, exact: bool
) -> Tensor:
    """ops.linear_grad_input for an unseen g; no gradient flows."""
    if exact:
        gx = grad_input_in_block(g, codes, scales, storage, columns)
        if gx is not None:
            return gx
    return _redispatch_linear_grad_input(CPU, g, codes, scales, storage, columns, exact)


def rounds_twice(held: torch.dtype, cast: torch.dtype) -> bool:
    """Whether a dense weight of dtype `held` has other values after the cast than its codes have,
    rounded to the dtype of the cast at once."""
    return cast is not held and held is not torch.float32


def rounds_by_autocast(weight: StowedTensor, dtype: torch.dtype) -> bool:
    """Whether this is autocast's own cast of an exact weight, which a dense one shows. The casts
    that a caller writes come here with autocast off: `_tensor/functions.py`."""
    if not weight._exact or not rounds_twice(weight.dtype, dtype):
        return False
    device = weight.device.type
    with _torch.RestorePythonTLSSnapshot():
        return torch.is_autocast_enabled(device) and dtype is torch.get_autocast_dtype(device)


def with_autocast(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handlers run with autocast off. Here the state of the caller comes back, so that the result
    is that of dense arguments bit for bit."""
    if _torch.len_torch_dispatch_stack() or torch.compiler.is_compiling():
        return called(*args, **kwargs)
    with _torch.RestorePythonTLSSnapshot(), torch.no_grad():
        return called(*args, **kwargs)


def _expanded(t: Any) -> tuple[StowedTensor, bool] | None:
    """The stowed matrix that `t` is a batch of, and whether of its transpose; else None."""
    if type(t) is not StowedView or t._weight._matrix is None or t.dim() != 3 or t.stride(0):
        return None
    w = t._weight
    rows, columns = w.shape
    if t.storage_offset() != w.storage_offset():
        return None
    for transposed, shape, stride in (
        (False, (rows, columns), (columns, 1)),
        (True, (columns, rows), (1, columns)),
    ):
        if t.shape[1:] == shape and t.stride()[1:] == stride:
            return w, transposed
    return None


@op(aten.bmm.default)
def _bmm(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    left, right = args
    if (found := _expanded(right)) is None or isinstance(left, PACKED):
        return NotImplemented
    w, transposed = found
    assert w._matrix is not None
    codes, scales, key, rows, exact, dtype, _ = w._matrix
    # Exact products are those of torch's kernel for batches; shapes that misfit have its error.
    if exact or left.dtype is not dtype or left.dim() != 3 or left.shape[0] != right.shape[0]:
        return NotImplemented
    if left.shape[2] != right.shape[1]:
        return NotImplemented
    x: Tensor = left.contiguous()
    if transposed:
        return linear(x, codes, scales, key, rows, None, exact)
    return linear_grad_input(x, codes, scales, key, w.shape[1], exact)

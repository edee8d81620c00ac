# SPDX-License-Identifier: Apache-2.0
"""The products without the dispatcher's upper layers, for calls that none of them would see.

register_autograd puts a Python function above an op: outside inference_mode it costs 7 us a call,
more than a small product. Where x is a dense CPU tensor and no mode, transform, tracer or profiler
is active, going straight to the CPU kernel is the same call; anything else takes the usual way.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from stowage._compute.products import grad_input_in_block, linear_in_block
from stowage._ops import _torch, library

CPU = _torch.DispatchKeySet(_torch.DispatchKey.CPU)
_linear = _torch.handle(library.linear).redispatch_boxed
linear_one_scale = _torch.handle(torch.ops.stowage._linear.default).redispatch_boxed
_linear_grad_input = _torch.handle(library.linear_grad_input).redispatch_boxed


def linear(
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
    return _linear(CPU, x, codes, scales, storage, rows, bias, exact)


def linear_grad_input(
    g: Tensor, codes: Tensor, scales: Sequence[Tensor], storage: int, columns: int, exact: bool
) -> Tensor:
    """ops.linear_grad_input for an unseen g; no gradient flows."""
    if exact:
        gx = grad_input_in_block(g, codes, scales, storage, columns)
        if gx is not None:
            return gx
    return _linear_grad_input(CPU, g, codes, scales, storage, columns, exact)

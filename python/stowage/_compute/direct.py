# SPDX-License-Identifier: Apache-2.0
"""The products without the dispatcher's upper layers, for calls that none of them would see.

register_autograd puts a Python function above an op: outside inference_mode it costs 7 us a call,
more than a small product. Where x is a dense CPU tensor and no mode, transform, tracer or profiler
is active, going straight to the CPU kernel is the same call; anything else takes the usual way.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler
from torch.compiler import is_dynamo_compiling

from stowage import ops
from stowage._compute.products import grad_input_in_block, linear_in_block

CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_functorch_active = torch._C._are_functorch_transforms_active
_modes = torch._C._len_torch_dispatch_stack
_tracing = torch._C._is_tracing
_linear = ops.linear._handle.redispatch_boxed
linear_one_scale = torch.ops.stowage._linear.default._handle.redispatch_boxed
_linear_grad_input = ops.linear_grad_input._handle.redispatch_boxed


def transforming() -> bool:
    """Under torch.func, or inside forward_ad.dual_level()."""
    return _functorch_active() or forward_ad._current_level >= 0


def unseen(x: Tensor) -> bool:
    """Nothing above the CPU kernel would see an op on x, except autograd."""
    return (
        not is_dynamo_compiling()
        and type(x) is Tensor
        and x.is_cpu
        and not _functorch_active()
        and forward_ad._current_level < 0
        and not _modes()
        and not profiler._is_profiler_enabled
        and not _tracing()
    )


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

# SPDX-License-Identifier: Apache-2.0
"""The products without the dispatcher's upper layers, for calls that none of them would see.

register_autograd puts a Python function above an op: outside inference_mode it costs 7 us a call,
more than a small product. Where x is a dense CPU tensor and no mode, transform, tracer or profiler
is active, going straight to the CPU kernel is the same call; anything else takes the usual way.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from stowage import ops

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_functorch_active = torch._C._are_functorch_transforms_active
_modes = torch._C._len_torch_dispatch_stack
_profiling = torch._C._autograd._profiler_enabled
_tracer = torch._C._get_tracing_state
_linear = ops.linear._handle.redispatch_boxed
_linear_grad_input = ops.linear_grad_input._handle.redispatch_boxed


def transforming() -> bool:
    """Under torch.func, or inside forward_ad.dual_level()."""
    return _functorch_active() or forward_ad._current_level >= 0


def unseen(x: Tensor) -> bool:
    """Nothing above the CPU kernel would see an op on x, except autograd."""
    # is_neg: a view of a complex tensor's conjugate, whose memory is not its value.
    return (
        not is_dynamo_compiling()
        and type(x) is Tensor
        and x.is_cpu
        and not _functorch_active()
        and forward_ad._current_level < 0
        and not _modes()
        and not _profiling()
        and _tracer() is None
        and not x.is_neg()
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
    return _linear(_CPU, x, codes, scales, storage, rows, bias, exact)


def linear_grad_input(
    g: Tensor, codes: Tensor, scales: Sequence[Tensor], storage: int, columns: int, exact: bool
) -> Tensor:
    """ops.linear_grad_input for an unseen g; no gradient flows."""
    return _linear_grad_input(_CPU, g, codes, scales, storage, columns, exact)

# SPDX-License-Identifier: Apache-2.0
"""Autocast below the point where it acts: which casts are its own, and operators inside which it
goes on acting, as torch's bilinear casts not its arguments but the products it is made of."""

from typing import Any

import torch

from stowage._ops import _torch
from stowage.tensor import StowedTensor


def rounds_twice(held: torch.dtype, cast: torch.dtype) -> bool:
    """Whether a dense weight of dtype `held` has other values after the cast than its codes have,
    rounded to the dtype of the cast at once."""
    return cast is not held and held is not torch.float32


def rounds_by_autocast(weight: StowedTensor, dtype: torch.dtype) -> bool:
    """Whether this is autocast's own cast of an exact weight, which a dense one shows. The casts
    that a caller writes come here with autocast off: `functions.py`."""
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

# SPDX-License-Identifier: Apache-2.0
"""Running an operator inside which autocast goes on acting: torch's bilinear casts not its
arguments but the matrix products that it is made of."""

from typing import Any

import torch


def with_autocast(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handlers run with autocast off. Here the state of the caller comes back, so that the result
    is that of dense arguments bit for bit."""
    if torch._C._len_torch_dispatch_stack() or torch.compiler.is_compiling():
        return called(*args, **kwargs)
    with torch._C._RestorePythonTLSSnapshot(), torch.no_grad():  # type: ignore[attr-defined]
        return called(*args, **kwargs)

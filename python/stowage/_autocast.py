# SPDX-License-Identifier: Apache-2.0
"""The operator inside which autocast goes on acting: torch's bilinear casts not its arguments but
the matrix products that it is made of."""

from typing import Any

import torch

from stowage.registry import op
from stowage.views import plain


@op(torch.ops.aten._trilinear.default)
def _trilinear(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handlers run with autocast off. Here the state of the caller comes back, so that the result
    is that of a dense weight bit for bit."""
    values, named = plain(args), plain(kwargs)
    if torch._C._len_torch_dispatch_stack() or torch.compiler.is_compiling():
        return called(*values, **named)
    with torch._C._RestorePythonTLSSnapshot(), torch.no_grad():  # type: ignore[attr-defined]
        return called(*values, **named)

# SPDX-License-Identifier: Apache-2.0
"""How a slice was taken from its weight: what copies and pickles of it go by, so that they share
memory and scales with the copy of that weight, and know it."""

from collections.abc import Sequence
from typing import Any

import torch

Steps = Sequence[tuple[str, tuple[int, ...]]]  # name of an operator, and what it takes

_aten = torch.ops.aten
_OPS = {str(op): op for op in (_aten.slice.Tensor, _aten.select.int)}


def steps(trail: Sequence[Any]) -> Steps:
    """Of a trail of view ops (views.Step), in a form that can be pickled."""
    return [(str(step.op), tuple(step.args)) for step in trail]


def followed(weight: Any, taken: Steps) -> Any:
    """The slice of a weight at the end of these steps."""
    with torch.inference_mode(False), torch.no_grad():
        for name, given in taken:
            weight = _OPS[name](weight, *given)
    return weight


def rebuild(weight: Any, taken: Steps, requires_grad: bool, extras: dict[str, Any]) -> Any:
    """What pickles of a slice call. Files depend on it: keep its name and arguments."""
    result = followed(weight, taken)
    result.requires_grad_(requires_grad)
    result.__dict__.update(extras)
    return result


rebuild.__module__ = "stowage._trails"  # pickles name it


torch.serialization.add_safe_globals([rebuild])

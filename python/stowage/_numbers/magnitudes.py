# SPDX-License-Identifier: Apache-2.0
"""The largest magnitude of each of many tensors, by stock torch ops: on devices without our
kernels, and in graphs, where a compiler joins them with what comes before."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from stowage import _torch


def amaxes(values: Sequence[Tensor]) -> Tensor:
    """max |x| of each tensor, fp32 [count]: 0 for no values, the quiet NaN where there is one. All
    on one device.

    Reads each once and writes nothing: |x| of a large tensor is a copy, whose pages cost more. A
    maximum is exact in any dtype."""
    some = [v.detach() for v in values if v.numel()]
    if not some:
        where = values[0].device if values else "cpu"
        return torch.zeros(len(values), dtype=torch.float32, device=where)
    if some[0].device.type != "cpu":
        found = torch.stack([n.to(torch.float32) for n in _torch.foreach_norm(some, math.inf)])
    else:
        low, high = zip(*map(torch.aminmax, some), strict=True)
        found = torch.maximum(-_as_one(low), _as_one(high)).abs()
    found = found.masked_fill(found.isnan(), math.nan)
    if len(some) == len(values):
        return found
    every = found.new_zeros(len(values))
    every[[at for at, v in enumerate(values) if v.numel()]] = found
    return every


def _as_one(scalars: Sequence[Tensor]) -> Tensor:
    """fp32 [count]; of several dtypes, perhaps."""
    one = len({scalar.dtype for scalar in scalars}) == 1
    return torch.stack([*scalars] if one else [s.to(torch.float32) for s in scalars]).to(
        torch.float32
    )

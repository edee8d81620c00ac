# SPDX-License-Identifier: Apache-2.0
"""Largest magnitudes of values that tensor parallelism has cut: what one rank has is not all."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Cut(NamedTuple):
    """Along which dimension of the weight [N, K] its pieces lie, and who has them."""

    dim: int | None  # 0: ColwiseParallel; 1: RowwiseParallel; None: every rank has all of it
    group: Any

    @property
    def rows(self) -> bool:
        """N is cut: outputs and their gradients with it."""
        return self.dim == 0

    @property
    def columns(self) -> bool:
        """K is cut: inputs with it."""
        return self.dim == 1


WHOLE = Cut(None, None)


def over_ranks(amax: Tensor, cut: Cut, spread: bool) -> Tensor:
    """`amax` (fp32, 0 or more) over all pieces, if `spread` says that there are others.

    Compared as bits, in which NaN is above inf: a backend's MAX may lose a NaN."""
    if not spread or cut.dim is None or dist.get_world_size(cut.group) == 1:
        return amax
    bits = amax.contiguous().view(torch.int32) & 0x7FFFFFFF
    dist.all_reduce(bits, dist.ReduceOp.MAX, group=cut.group)
    return bits.view(torch.float32)

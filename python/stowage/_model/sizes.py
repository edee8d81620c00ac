# SPDX-License-Identifier: Apache-2.0
"""Bytes that tensors and models take, not those that they show: `stowage.nbytes`, and the counting
of memory that several names share."""

from collections.abc import Iterable

from torch import Tensor, nn

from stowage.tensor import StowedTensor
from stowage.views import StowedView

Seen = set[object]  # places in memory that have been counted


def nbytes(of: Tensor | nn.Module) -> int:
    """Bytes at rest of a tensor, or of the parameters and buffers of a module.

    Codes and scales of a stowed tensor (a view of one counts the weight that it shows); the values
    of a plain one. In a module memory that several names share counts once. On the meta device it
    is what the tensors would take.
    """
    if isinstance(of, Tensor):
        return sum(part.nbytes for part in memory(of))
    seen: Seen = set()
    return sum(new_bytes(memory(t), seen) for t in (*of.parameters(), *of.buffers()))


def memory(tensor: Tensor) -> list[Tensor]:
    """What a tensor is made of: codes and scales, or itself."""
    weight = tensor._weight if isinstance(tensor, StowedView) else tensor
    return weight._parts() if isinstance(weight, StowedTensor) else [weight.detach()]


def new_bytes(tensors: Iterable[Tensor], seen: Seen) -> int:
    """Bytes of those tensors whose memory is not in `seen`; adds it. Of tensors on the meta device
    each object counts."""
    total = 0
    for tensor in tensors:
        where = id(tensor) if tensor.is_meta else (tensor.device, tensor.data_ptr(), tensor.nbytes)
        if where not in seen:
            seen.add(where)
            total += tensor.nbytes
    return total

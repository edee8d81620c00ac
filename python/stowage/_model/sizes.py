# SPDX-License-Identifier: Apache-2.0
"""`stowage.nbytes`: bytes that tensors and models take, not those that they show."""

from torch import Tensor, nn

from stowage.tensor import StowedTensor
from stowage.views import StowedView


def nbytes(of: Tensor | nn.Module) -> int:
    """Bytes at rest of a tensor, or of the parameters and buffers of a module.

    Codes and scales of a stowed tensor (a view of one counts the weight that it shows); the values
    of a plain one. In a module memory that several names share counts once. On the meta device it
    is what the tensors would take.
    """
    if isinstance(of, Tensor):
        return sum(part.nbytes for part in _memory(of))
    memory: dict[object, int] = {}
    for tensor in (*of.parameters(), *of.buffers()):
        for part in _memory(tensor):
            where = id(part) if part.is_meta else (part.device, part.data_ptr(), part.nbytes)
            memory[where] = part.nbytes
    return sum(memory.values())


def _memory(tensor: Tensor) -> list[Tensor]:
    weight = tensor._weight if isinstance(tensor, StowedView) else tensor
    return weight._parts() if isinstance(weight, StowedTensor) else [weight]

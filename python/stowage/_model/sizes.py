# SPDX-License-Identifier: Apache-2.0
"""Bytes that tensors and models take, not those that they show: `stowage.nbytes`, the counting of
memory that several names share, and sizes as users write them."""

import re
from collections.abc import Iterable

from torch import Tensor, nn

from stowage._ops.errors import InvalidArgument
from stowage._shard.local_shards import values_of
from stowage._shard.rows import StowedRows
from stowage._tensor.stowed import StowedTensor
from stowage._tensor.views import StowedView

Seen = set[object]  # places in memory that have been counted


def nbytes(of: Tensor | nn.Module) -> int:
    """Bytes at rest of a tensor, or of the parameters and buffers of a module.

    Codes and scales of a stowed tensor (a view of one counts the weight that it shows); the values
    of a plain one. In a module memory that several names share counts once. On the meta device it
    is what the tensors would take.

    Args:
        of: a tensor or a module.

    Returns:
        Bytes.

    Example:
        >>> stowage.nbytes(stowage.quantize(torch.randn(64, 64), "int8:row"))  # and 64 fp32 scales
        4352
    """
    if isinstance(of, Tensor):
        return sum(part.nbytes for part in memory(of))
    seen: Seen = set()
    return sum(new_bytes(memory(t), seen) for t in (*of.parameters(), *of.buffers()))


def memory(tensor: Tensor) -> list[Tensor]:
    """What a tensor is made of: codes and scales, or itself; of one that is spread over processes
    what this one holds."""
    tensor = values_of(tensor)
    if isinstance(tensor, StowedRows):
        return [tensor._records, *tensor._shared()]
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


_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def byte_count(given: int | str, name: str) -> int:
    """3221225472 of "3GiB" or of itself. Raises InvalidArgument, saying `name`, for what is no
    size."""
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return given
    text = given if isinstance(given, str) else ""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    if found is None or found[2].upper() not in _UNITS:
        raise InvalidArgument(
            f"stowage: {name} must be a number of bytes or a text such as '3GiB' or '800 MB', "
            f"got {given!r}"
        )
    return int(float(found[1]) * _UNITS[found[2].upper()])

# SPDX-License-Identifier: Apache-2.0
"""How codes lie in bytes, as the packing of a storage says: two of four bits in a byte, the first
in its high half or in its low one, or densely, eight of any width in as many bytes as a code has
bits. The codes of a byte are neighbours in the last dimension."""

import torch
from torch import Tensor

_EIGHT = 8  # codes that fill bytes where they lie densely


def pack(codes: Tensor, packing: str, bits: int = 4) -> Tensor:
    """Bytes of uint8 codes of so many bits, in the last dimension an even number of them, or one
    of whole eights."""
    if packing == "dense":
        return _moved(codes, _EIGHT, bits, bits, 8)
    first, second = codes[..., 0::2], codes[..., 1::2]
    return first << 4 | second if packing == "high_first" else second << 4 | first


def unpack(packed: Tensor, packing: str, bits: int = 4) -> Tensor:
    """The codes of these bytes, as many more in the last dimension."""
    if packing == "dense":
        return _moved(packed, bits, 8, _EIGHT, bits)
    high, low = packed >> 4, packed & 15
    pairs = (high, low) if packing == "high_first" else (low, high)
    return torch.stack(pairs, -1).flatten(-2)


def _moved(numbers: Tensor, count: int, bits: int, made: int, width: int) -> Tensor:
    """From `count` numbers of `bits` bits each to `made` of `width`, in the same string of bits."""
    one = numbers.unflatten(-1, (-1, count))
    string = torch.zeros(one.shape[:-1], dtype=torch.int64, device=numbers.device)
    for i in range(count):
        string |= one[..., i].to(torch.int64) << (i * bits)
    mask = (1 << width) - 1
    out = [(string >> (i * width) & mask).to(torch.uint8) for i in range(made)]
    return torch.stack(out, -1).flatten(-2)


def pick(packed: Tensor, index: Tensor, packing: str) -> Tensor:
    """The codes of these numbers, int32, among those of flat bytes, two in each."""
    pairs = packed.view(-1)[index >> 1]
    high = index & 1 == (0 if packing == "high_first" else 1)
    return torch.where(high, pairs >> 4, pairs & 15).to(torch.int32)

# SPDX-License-Identifier: Apache-2.0
"""How two 4-bit codes lie in a byte: the first in its high half or in its low one, as the packing
of a storage says. The codes of a byte are neighbours in the last dimension."""

import torch
from torch import Tensor


def pack(codes: Tensor, packing: str) -> Tensor:
    """Bytes of uint8 codes below 16, an even number of them in the last dimension."""
    first, second = codes[..., 0::2], codes[..., 1::2]
    return first << 4 | second if packing == "high_first" else second << 4 | first


def unpack(packed: Tensor, packing: str) -> Tensor:
    """The codes of these bytes, twice as many in the last dimension."""
    high, low = packed >> 4, packed & 15
    pairs = (high, low) if packing == "high_first" else (low, high)
    return torch.stack(pairs, -1).flatten(-2)


def pick(packed: Tensor, index: Tensor, packing: str) -> Tensor:
    """The codes of these numbers, int32, among those of flat bytes."""
    pairs = packed.view(-1)[index >> 1]
    high = index & 1 == (0 if packing == "high_first" else 1)
    return torch.where(high, pairs >> 4, pairs & 15).to(torch.int32)

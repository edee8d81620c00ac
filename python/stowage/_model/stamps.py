# SPDX-License-Identifier: Apache-2.0
"""Stamps of tensors: 64 bits that tell whether any byte has changed since, wherever it stands."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

_WORDS = 1 << 16  # of 4 bytes, at once
_STEP = 6364136223846793005  # odd, so that no word of an earlier block is lost
_MODULUS = 1 << 64


@cache
def _factors() -> Tensor:
    made = torch.Generator().manual_seed(0x57077A6E)
    return torch.randint(-(2**63), 2**63 - 1, (_WORDS,), generator=made)


def stamp(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """One number for each tensor, of its bytes in order. Two contents that differ in known places
    have the same stamp with a probability of 2^-33: a sum of words times random factors, words of
    32 bits in 64. A sum without factors would not see that rows change places."""
    return tuple(_stamp(tensor.detach()) for tensor in tensors)


def _stamp(tensor: Tensor) -> int:
    if tensor.is_meta:
        return -1  # no values
    octets = tensor.contiguous().reshape(-1).view(torch.uint8).cpu()
    whole = octets.numel() // 4 * 4
    if octets.storage_offset() % 4:  # torch cannot look at these as words
        octets = octets.clone()
    words, total = octets[:whole].view(torch.int32), octets.numel()
    for first in range(0, len(words), _WORDS):
        block = words[first : first + _WORDS].to(torch.int64)
        total = (total * _STEP + int(torch.dot(block, _factors()[: len(block)]))) % _MODULUS
    for octet in octets[whole:].tolist():
        total = (total * _STEP + octet + 1) % _MODULUS
    return total

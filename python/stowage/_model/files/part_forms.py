# SPDX-License-Identifier: Apache-2.0
"""Tensors of a peer's file from parts that were made of them in another form: the way back of
src/store/part_form.cpp, which refuses what these would not write again."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

_TILE_ROWS, _TILE_COLUMNS, _QUARTER = 128, 4, 32
_IN_A_WORD = 8  # zero points
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _padded(part: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """With zeros up to multiples of these."""
    return functional.pad(part, (0, -part.shape[1] % columns, 0, -part.shape[0] % rows))


def _swizzled(scales: torch.Tensor) -> torch.Tensor:
    padded = _padded(scales, _TILE_ROWS, _TILE_COLUMNS)
    tiles = padded.view(-1, _TILE_ROWS // _QUARTER, _QUARTER, padded.shape[1] // 4, _TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(padded.shape)


def _zeros_in_words(zeros: torch.Tensor) -> torch.Tensor:
    """Of eight rows of a group in an int32, the first in its lowest bits."""
    codes = _padded((zeros + 8).to(torch.uint8), _IN_A_WORD, 1)
    return _words(codes.view(-1, _IN_A_WORD, codes.shape[1]).permute(0, 2, 1))[..., 0]


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Of bytes [..., n], the low one first: [..., 2 n]."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def _words(nibbles: torch.Tensor) -> torch.Tensor:
    """Eight in an int32, the first in its lowest bits."""
    octets = nibbles[..., ::2] | nibbles[..., 1::2] << 4
    return octets.clone(memory_format=torch.contiguous_format).view(torch.int32)


def _turned(part: torch.Tensor) -> torch.Tensor:
    return part.T.contiguous()


def _zeros_across(zeros: torch.Tensor) -> torch.Tensor:
    return _words(_turned((zeros + 8).to(torch.uint8)))


def _zeros_less_one(zeros: torch.Tensor) -> torch.Tensor:
    return (_zeros_across(zeros).to(torch.int64) - 0x11111111).to(torch.int32)  # modulo 2^32


def _in_awq_order(nibbles: torch.Tensor) -> torch.Tensor:
    """[columns, rows] with the rows of each word as they lie in it."""
    columns, rows = nibbles.shape
    return nibbles.view(columns, rows // 8, 8)[..., list(_AWQ_ORDER)].reshape(columns, rows)


def _awq_codes(codes: torch.Tensor) -> torch.Tensor:
    return _words(_in_awq_order(_turned(_nibbles(codes))))


def _awq_zeros(zeros: torch.Tensor) -> torch.Tensor:
    return _words(_in_awq_order(_turned((zeros + 8).to(torch.uint8))))


TENSORS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "unswizzled": _swizzled,
    "zeros_down": _zeros_in_words,
    "turned": _turned,
    "turned_words": lambda codes: _turned(codes.contiguous().view(torch.int32)),
    "zeros_across": _zeros_across,
    "zeros_less_one": _zeros_less_one,
    "awq_codes": _awq_codes,
    "awq_zeros": _awq_zeros,
}

# SPDX-License-Identifier: Apache-2.0
"""Copies into new memory, in large pages: touching new memory page by page takes three times as
long as the copy itself."""

import ctypes

import torch
from torch import Tensor

_LARGE = 2 << 20  # bytes of a page
_ADVICE = 14  # MADV_HUGEPAGE of Linux
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def new_copy(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A copy of its own, contiguous, without gradients; rounded where `dtype` is another one."""
    source = tensor.detach()
    if source.device.type != "cpu" or source.numel() < _LARGE:
        return source.to(dtype or source.dtype, copy=True, memory_format=torch.contiguous_format)
    made = torch.empty(source.shape, dtype=dtype or source.dtype)
    _ask_for_large_pages(made)
    return made.copy_(source)


def _ask_for_large_pages(tensor: Tensor) -> None:
    """Of those that lie inside. Advice: where the system declines, nothing is wrong."""
    first = -(-tensor.data_ptr() // _LARGE) * _LARGE
    last = (tensor.data_ptr() + tensor.nbytes) // _LARGE * _LARGE
    if first < last:
        _madvise(first, last - first, _ADVICE)

# SPDX-License-Identifier: Apache-2.0
"""Copies into new memory, in large pages: touching new memory page by page takes three times as
long as the copy itself. And which memory must be copied before a write: mapped read-only, so that a
write would end the process, or mapped in a forked process too, which would see it."""

import copy
import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LARGE = 2 << 20  # bytes of a page
_ADVICE = 14  # MADV_HUGEPAGE of Linux
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_is_shared: Callable[[Tensor], bool] | None = None
_copies = 0  # made so far, of mapped memory that was written to, or of models that changed


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


def octets(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a plain tensor, uint8 [nbytes]: its own memory if contiguous, else a copy."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


_copier: Callable[[Tensor], Tensor] = new_copy


def copies_made() -> int:
    """A number that changes whenever a weight may have left its file."""
    return _copies


def note_copies() -> None:
    global _copies
    _copies += 1


def copy_with(copier: Callable[[Tensor], Tensor], is_shared: Callable[[Tensor], bool]) -> None:
    """Has `copier` decide where copies of mapped memory go that is written to, and `is_shared` what
    is copied though it could be written."""
    global _copier, _is_shared
    _copier, _is_shared = copier, is_shared


def copied(part: Tensor, memo: dict[int, Any]) -> Tensor:
    """A deep copy; of mapped memory one that is made at the first write."""
    return part.detach() if is_copied_before_writes(part) else copy.deepcopy(part, memo)


class _Octets:
    """Pickled as the bytes of a tensor, which it is again when it is read."""

    def __init__(self, part: Tensor) -> None:
        self._part = part.detach().contiguous()

    def __reduce__(self) -> tuple[Any, ...]:
        flat = self._part.reshape(-1).view(torch.uint8)
        return _of_octets, (bytearray(flat.numpy()), self._part.dtype, tuple(self._part.shape))


def _of_octets(octets: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not octets:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(octets, dtype=torch.uint8).clone().view(dtype).view(shape)


def sent(part: Tensor) -> Any:
    """What goes to another process. torch hands the memory itself over, which would take mapped
    memory out of its file here: its bytes go."""
    return _Octets(part) if is_borrowed(part) else part.detach()


def ensure_writable(part: Tensor) -> None:
    """Gives `part` a copy of its memory if that must not be written.

    The tensor object stays, so every alias of a weight, which has the same object, follows.
    """
    if is_copied_before_writes(part):
        part.data = _copier(part)
        note_copies()


def is_copied_before_writes(part: Tensor) -> bool:
    """Whether a write to this memory would end the process, or reach another one."""
    if not is_borrowed(part):
        return False
    return _read_only(part) or (_is_shared is not None and _is_shared(part))


def is_borrowed(part: Tensor) -> bool:
    """Whether this is memory that torch did not allocate: mapped from a file."""
    return part.device.type == "cpu" and not part.untyped_storage().resizable()


def _read_only(part: Tensor) -> bool:
    first = part.data_ptr()
    last = first + part.nbytes
    with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
        for line in maps:
            span, permissions = line.split(maxsplit=2)[:2]
            start, stop = (int(end, 16) for end in span.split("-"))
            if start < last and first < stop and "w" not in permissions:
                return True
    return False

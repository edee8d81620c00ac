# SPDX-License-Identifier: Apache-2.0
"""Copies from the CPU to a device: on a stream of their own where the device has streams, out of
pinned memory where it can be pinned; else plain ones, which the host waits for.

Nothing is waited for on the host but a tile of staging memory, and no whole device is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from stowage._ops import library
from stowage._ops.memory import is_borrowed, octets
from stowage._ops.storage import Storage

TILE = 4 << 20  # bytes of one staging buffer, and of one read through the engine of a file
_WORDS = Storage.parse("f32").key


class Link:
    """To one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = _stream(device)
        self._staging = _Staging(self) if self.stream is not None else None

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Iterable[Any]) -> Any:
        """Copies (resting part, bytes on the device) pairs once the events `after` have happened on
        the device. Gives the event of their end, None where it has ended."""
        if self.stream is None or self._staging is None:
            for part, there in pairs:
                for at, piece in _pieces(part):
                    there[at : at + piece.numel()].copy_(piece)
            return None
        for event in after:
            if event is not None:
                self.stream.wait_event(event)
        with self._on_stream():
            for part, there in pairs:
                pinned = part.is_pinned()
                for at, piece in _pieces(part):
                    into = there[at : at + piece.numel()]
                    if pinned:
                        into.copy_(piece, non_blocking=True)
                    else:
                        self._staging.copy(piece, into)
            return self.mark(self.stream)

    def current(self) -> Any:
        """The stream that the calling thread gives work to; None where there are none."""
        if self.stream is None:
            return None
        return torch.accelerator.current_stream(self.device.index)

    def mark(self, stream: Any) -> Any:
        """An event at the end of the work given to `stream`; None of none."""
        if stream is None:
            return None
        event = torch.Event(device=self.device)
        event.record(stream)
        return event

    def finish(self) -> None:
        """Waits for all copies."""
        if self.stream is not None:
            self.stream.synchronize()

    def _on_stream(self) -> AbstractContextManager[Any]:
        return self.stream if self.stream is not None else nullcontext()


class _Staging:
    """Two tiles of pinned memory, where the device can pin: the way of what is not pinned."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._tiles: list[Tensor] = []
        self._busy: list[Any] = []
        self._turn = 0

    def copy(self, piece: Tensor, into: Tensor) -> None:
        if not self._tiles and not self._make():
            into.copy_(piece)
            return
        self._turn = 1 - self._turn
        if self._busy[self._turn] is not None:
            self._busy[self._turn].synchronize()  # of its copy two tiles ago
        tile = self._tiles[self._turn][: piece.numel()].copy_(piece)
        into.copy_(tile, non_blocking=True)
        self._busy[self._turn] = self._link.mark(self._link.stream)

    def _make(self) -> bool:
        try:
            with torch.inference_mode(False):
                made = [torch.empty(TILE, dtype=torch.uint8).pin_memory() for _ in range(2)]
        except (RuntimeError, NotImplementedError):
            return False
        self._tiles, self._busy = made, [None, None]
        return True


def _stream(device: torch.device) -> Any:
    """A stream for copies; None where the device has none, or no events."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return None
    try:
        stream = torch.Stream(device=device)
        torch.Event(device=device).record(stream)
    except (RuntimeError, NotImplementedError):
        return None
    return stream if hasattr(stream, "__enter__") else None


def _pieces(part: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The bytes of a resting part on the CPU, a tile at a time, and where each begins.

    A part that is mapped from a file is read by an op of ours, which finds the file's engine by the
    address and leases the bytes from it, within the engine's budget: as fp32 words, whose plain
    cast to fp32 is a copy. The last bytes that are no word are read through the mapping.
    """
    flat = octets(part)
    borrowed = is_borrowed(part)
    for at in range(0, flat.numel(), TILE):
        piece = flat[at : at + TILE]
        words = piece.numel() // 4
        if borrowed and words:
            codes = piece[: words * 4].view(torch.float32)
            yield at, octets(library.dequantize(codes, [], _WORDS, [words], torch.float32))
            at, piece = at + words * 4, piece[words * 4 :]
        if piece.numel():
            yield at, piece

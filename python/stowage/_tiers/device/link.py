# SPDX-License-Identifier: Apache-2.0
"""Copies from the CPU to a device: on a stream of their own where the device has streams, out of
pinned memory where it can be pinned; else plain ones, which the host waits for.

Nothing is waited for on the host but a tile of staging memory, and no whole device is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from stowage._ops import library
from stowage._ops.memory import is_borrowed, octets
from stowage._ops.storage import Storage

TILE = 4 << 20  # bytes of one staging buffer, and of one read through the engine of a file
ALIGN = 256  # bytes: what every part of a unit begins at
_WORDS = Storage.parse("f32").key


class Link:
    """To one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = _stream(device)
        self.crossed = 0  # bytes so far
        self._staging = _Staging(self) if self.stream is not None else None

    def copy(self, parts: list[Tensor], there: Tensor, after: Iterable[Any]) -> Any:
        """Copies the resting parts of a unit to `there`, bytes on the device, where each begins as
        offsets() says, once the events `after` have happened on the device: in as few copies as
        hold them all. Gives the event of their end, None where it has ended."""
        if self.stream is None or self._staging is None:
            for at, piece in _pieces(parts):
                self.give(piece, there[at : at + piece.numel()])
            return None
        for event in after:
            if event is not None:
                self.stream.wait_event(event)
        whole = _as_one(parts)
        with self._on_stream():
            if whole is not None:
                self.give(whole, there[: whole.numel()], pinned=True)
            else:
                self._staging.copy(_pieces(parts), there)
            return self.mark(self.stream)

    def give(self, source: Tensor, into: Tensor, pinned: bool = False) -> None:
        """One copy, which the host waits for unless the source is pinned."""
        into.copy_(source, non_blocking=pinned)
        self.crossed += into.numel()

    def current(self) -> Any:
        """The stream that the calling thread gives work to; None where there are none."""
        if self.stream is None:
            return None
        return torch.accelerator.current_stream(self.device.index)

    def is_captured(self) -> bool:
        """Whether what the calling thread gives to its stream becomes part of a graph."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

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

    def copy(self, pieces: Iterable[tuple[int, Tensor]], there: Tensor) -> None:
        """Copies each piece to where it begins in `there`: pinned ones at once, others by way of
        tiles, each of which takes the pieces that follow each other in its bytes."""
        begin = end = 0  # of what the tile has
        for at, piece in pieces:
            into = there[at : at + piece.numel()]
            pinned = piece.is_pinned()
            if pinned or (not self._tiles and not self._make()):
                self._link.give(piece, into, pinned)
            else:
                if end and at + piece.numel() - begin > TILE:
                    self._send(there[begin:end])
                    end = 0
                if not end:
                    begin, self._turn = at, 1 - self._turn
                    if self._busy[self._turn] is not None:
                        self._busy[self._turn].synchronize()  # of its copy two tiles ago
                end = at + piece.numel()
                self._tiles[self._turn][at - begin : end - begin].copy_(piece)
        if end:
            self._send(there[begin:end])

    def _send(self, into: Tensor) -> None:
        self._link.give(self._tiles[self._turn][: into.numel()], into, pinned=True)
        self._busy[self._turn] = self._link.mark(self._link.stream)

    def _make(self) -> bool:
        try:
            with torch.inference_mode(False):
                made = [torch.zeros(TILE, dtype=torch.uint8).pin_memory() for _ in range(2)]
        except (RuntimeError, NotImplementedError):
            return False
        self._tiles, self._busy = made, [None, None]
        return True


def padded(size: int) -> int:
    """`size` bytes in whole steps of ALIGN."""
    return -(-size // ALIGN) * ALIGN


def offsets(parts: Iterable[Tensor]) -> list[int]:
    """Where each part begins in the bytes of a unit, and where these end: at steps of ALIGN."""
    return list(accumulate((padded(part.nbytes) for part in parts), initial=0))


def pinned_together(parts: list[Tensor]) -> list[Tensor]:
    """Copies in pinned memory that lie as on a device, so that one copy takes them there."""
    places = offsets(parts)
    memory = torch.zeros(places[-1], dtype=torch.uint8).pin_memory()
    made = []
    for at, part in zip(places, parts, strict=False):
        made.append(memory[at : at + part.nbytes].view(part.dtype).view(part.shape))
        made[-1].copy_(part.detach())
    return made


def _as_one(parts: list[Tensor]) -> Tensor | None:
    """Their bytes, padding included, if they lie in pinned memory as on a device."""
    places, memory = offsets(parts), parts[0].untyped_storage()
    begin = parts[0].storage_offset() * parts[0].itemsize
    for at, part in zip(places, parts, strict=False):
        found = part.storage_offset() * part.itemsize - begin
        same = part.untyped_storage().data_ptr() == memory.data_ptr()
        if found != at or not same or not part.is_contiguous() or not part.is_pinned():
            return None
    size = places[len(parts) - 1] + parts[-1].nbytes
    return torch.empty(0, dtype=torch.uint8).set_(memory, begin, (size,), (1,))


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


def _pieces(parts: list[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """The bytes of resting parts on the CPU, at most a tile at a time, and where each piece begins
    in those of the unit.

    A part that is mapped from a file is read by an op of ours, which finds the file's engine by the
    address and leases the bytes from it, within the engine's budget: as fp32 words, whose plain
    cast to fp32 is a copy. The last bytes that are no word are read through the mapping.
    """
    for begin, part in zip(offsets(parts), parts, strict=False):
        flat = octets(part)
        borrowed = is_borrowed(part)
        for at in range(0, flat.numel(), TILE):
            piece, to = flat[at : at + TILE], begin + at
            words = piece.numel() // 4
            if borrowed and words:
                codes = piece[: words * 4].view(torch.float32)
                yield to, octets(library.dequantize(codes, [], _WORDS, [words], torch.float32))
                to, piece = to + words * 4, piece[words * 4 :]
            if piece.numel():
                yield to, piece

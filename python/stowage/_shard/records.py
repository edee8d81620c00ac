# SPDX-License-Identifier: Apache-2.0
"""Row records: rows of a resting weight as one uint8 tensor [rows, length], so that they can lie in
different processes whatever the blocks are. docs/sharding.md draws the layout.

A record is what the row's scales stand under, where that is its own, its scale slots (a zero stands
behind its scale), its codes from a byte's start, and zero bytes up to a multiple of 4 where slots
or those numbers have 4 bytes. Which bytes it has depends on the
row's number and on the columns alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from stowage._ops.numbers.packing import pack, unpack
from stowage._ops.storage import Storage

_T = TypeVar("_T")
_PIECE = 1 << 21  # codes that are unpacked at once, where rows do not start on bytes


@dataclass(frozen=True)
class Geometry:
    """Of the records of one shape: counts, and bytes of each piece of a record."""

    rows: int
    columns: int  # elements of a row
    outer_bytes: int  # of numbers over scales
    slots: int  # scales in a record
    scale_bytes: int
    code_bytes: int
    length: int  # bytes of a record

    @property
    def used(self) -> int:
        return self.outer_bytes + self.scale_bytes + self.code_bytes


@lru_cache(maxsize=4096)
def geometry(storage: Storage, shape: tuple[int, ...]) -> Geometry:
    """How the rows (dim 0) of a weight rest as records. `shape` has one dimension or more."""
    rows, columns = shape[0], math.prod(shape[1:])
    layout = storage.layout(shape)
    if storage.flat:
        slots, code_bytes = _slots(columns, storage.block), (columns + 1) // 2
        return _geometry(rows, columns, 0, slots, layout[1][1].itemsize, code_bytes)
    code_bytes = math.prod(layout[0][2][1:]) * layout[0][1].itemsize
    kept, outers = _of_rows(layout, storage)
    outer_bytes = sum(math.prod(sizes[1:]) * dtype.itemsize for _, dtype, sizes in outers)
    each = storage.record or 1
    slots = math.prod(kept[0][2][1:]) // each if kept else 0
    itemsize = sum(dtype.itemsize for _, dtype, _ in kept) * each
    return _geometry(rows, columns, outer_bytes, slots, itemsize, code_bytes)


def _geometry(
    rows: int, columns: int, outer_bytes: int, slots: int, itemsize: int, code_bytes: int
) -> Geometry:
    used = outer_bytes + slots * itemsize + code_bytes
    length = -(-used // 4) * 4 if itemsize == 4 or outer_bytes else used
    return Geometry(rows, columns, outer_bytes, slots, slots * itemsize, code_bytes, length)


def _of_rows(parts: Sequence[_T], storage: Storage) -> tuple[Sequence[_T], Sequence[_T]]:
    """Of what rows have, the parts of scales, a zero behind its scale, and what is over them."""
    behind = min(1 + storage.of_groups, storage.in_rows)
    return parts[1:behind], parts[behind : storage.in_rows]


def _slots(columns: int, block: int) -> int:
    """The most blocks that a row can touch, since blocks run on across rows."""
    return (block - math.gcd(columns, block) + columns - 1) // block + 1 if columns else 0


def encode(
    parts: Sequence[Tensor], storage: Storage, shape: Sequence[int], first: int, last: int
) -> Tensor:
    """Rows [first, last) of a weight in its flat form, as uint8 [last - first, length]."""
    g = geometry(storage, tuple(shape))
    records = torch.empty(last - first, g.length, dtype=torch.uint8, device=parts[0].device)
    encode_into(records, parts, storage, shape, first)
    return records


def encode_into(
    records: Tensor, parts: Sequence[Tensor], storage: Storage, shape: Sequence[int], first: int
) -> None:
    """The same, of as many rows as there are records, into these."""
    g, last = geometry(storage, tuple(shape)), first + records.shape[0]
    if not records.numel():
        return
    records[:, g.used :] = 0
    scales = records[:, g.outer_bytes : g.outer_bytes + g.scale_bytes]
    codes = records[:, g.used - g.code_bytes : g.used]
    if not storage.flat:
        codes.copy_(_bytes(parts[0][first:last].reshape(last - first, -1)))
        kept, outers = _of_rows(parts, storage)
        if g.slots:
            where = _scale_rows(storage.rows_together(shape), first, last, records.device)
            slots = [_bytes(part[where].reshape(last - first, g.slots, -1)) for part in kept]
            scales.copy_(torch.cat(slots, 2).view(last - first, -1))
        for part in outers:
            records[:, : g.outer_bytes] = _bytes(part[first:last]).view(last - first, -1)
        return
    if g.columns % 2 == 0:
        codes.copy_(parts[0].view(g.rows, -1)[first:last])
    else:
        _encode_odd(codes, parts[0].view(-1), g, first)
    if g.columns % storage.block == 0:
        scales.copy_(_bytes(parts[1].view(g.rows, -1)[first:last]))
        return
    blocks, used = _blocks(g, storage.block, first, last, records.device)
    found = parts[1][blocks.clamp_max(parts[1].numel() - 1)].masked_fill_(~used, 0)
    scales.copy_(_bytes(found))


def decode(
    records: Tensor, storage: Storage, shape: Sequence[int], into: Sequence[Tensor], first: int = 0
) -> None:
    """Writes rows from `first` on into the flat parts `into`, as many as there are records. What
    belongs to other rows becomes zero, but for scales of blocks, which are left alone."""
    g = geometry(storage, tuple(shape))
    last = first + records.shape[0]
    if not records.numel():
        return
    held = records[:, g.outer_bytes : g.outer_bytes + g.scale_bytes]
    codes = records[:, g.used - g.code_bytes : g.used]
    if not storage.flat:
        own = into[0][first:last]
        own.view(last - first, -1).view(torch.uint8).copy_(codes)
        kept, outers = _of_rows(into, storage)
        for part in outers:
            numbers = records[:, : g.outer_bytes].contiguous().view(part.dtype)
            part[first:last] = numbers.view(last - first, *part.shape[1:])
        if g.slots:
            slots = held.unflatten(1, (g.slots, -1))
            rows = _scale_rows(storage.rows_together(shape), first, last, records.device)
            fields = slots.split([part.itemsize * (storage.record or 1) for part in kept], 2)
            for part, field in zip(kept, fields, strict=True):
                own = field.contiguous().view(part.dtype)
                part[rows] = own.view(last - first, *part.shape[1:])
        return
    if g.columns % 2 == 0:
        into[0].view(g.rows, -1)[first:last].copy_(codes)
    else:
        _decode_odd(codes, into[0].view(-1), g, first)
    scales = held.view(into[1].dtype)
    if g.columns % storage.block == 0:
        into[1].view(g.rows, -1)[first:last].copy_(scales)
        return
    blocks, used = _blocks(g, storage.block, first, last, records.device)
    # Where a slot is not used, the row's first block is written once more; rows that share a block
    # hold the same bits.
    where = torch.where(used, blocks, blocks[:, :1])
    into[1][where] = torch.where(used, scales, scales[:, :1])


def _scale_rows(each: int, first: int, last: int, device: torch.device) -> slice | Tensor:
    """Where the scales of rows [first, last) lie, which `each` share. These hold the same bits."""
    if each == 1:
        return slice(first, last)
    return torch.arange(first, last, device=device) // each


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def _blocks(
    g: Geometry, block: int, first: int, last: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The number of the block in each slot of rows [first, last), and whether the slot is used."""
    start = torch.arange(first, last, device=device)[:, None] * g.columns
    blocks = start // block + torch.arange(g.slots, device=device)
    return blocks, blocks <= (start + g.columns - 1) // block


# --- rows of an odd number of 4-bit codes: every other one starts inside a byte -------------------


def _encode_odd(codes: Tensor, flat: Tensor, g: Geometry, first: int) -> None:
    step = max(1, _PIECE // g.columns)
    for at in range(0, codes.shape[0], step):
        piece = codes[at : at + step]
        start, stop = (first + at) * g.columns, (first + at + piece.shape[0]) * g.columns
        pairs = unpack(flat[start // 2 : (stop + 1) // 2], "high_first")
        rows = torch.zeros(piece.shape[0], g.columns + 1, dtype=torch.uint8, device=flat.device)
        rows[:, :-1] = pairs[start % 2 :][: stop - start].view(-1, g.columns)
        if stop % 2 and first + at + piece.shape[0] == g.rows:
            rows[-1, -1] = pairs[-1]  # nobody's code, kept since bytes must come back
        piece.copy_(pack(rows.view(-1), "high_first").view_as(piece))


def _decode_odd(codes: Tensor, flat: Tensor, g: Geometry, first: int) -> None:
    if first % 2:
        codes, first = torch.nn.functional.pad(codes, (0, 0, 1, 0)), first - 1
    step = max(2, _PIECE // g.columns // 2 * 2)  # two rows end where a byte does
    for at in range(0, codes.shape[0], step):
        rows = unpack(codes[at : at + step].reshape(-1), "high_first").view(-1, 2 * g.code_bytes)
        values = rows[:, : g.columns].reshape(-1)
        if values.numel() % 2:
            values = torch.cat([values, rows[-1, -1:]])
        packed, start = pack(values, "high_first"), (first + at) * g.columns // 2
        flat[start : start + packed.numel()] = packed

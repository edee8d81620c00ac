# SPDX-License-Identifier: Apache-2.0
"""Row records against a plain oracle that walks over elements, and their way back to flat bytes."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stowage._ops.storage import Storage
from stowage._shard.records import decode, encode, geometry

STORAGES = (
    "nf4",
    "nf4:block64:nested",
    "fp4:block32",
    "f8_e4m3:row",
    "int8:block5",
    "int8:tensor",
    "bf16",
    "f8_e5m2",
)
COLUMNS = (1, 2, 3, 6, 7, 31, 33, 63, 64, 65, 96, 127, 200)
SHAPES = [(n, k) for n in range(1, 10) for k in COLUMNS]
WIDE = [(1, 5), (4, 3, 3, 3), (5, 1, 2, 2, 2), (257, 333), (300, 200), (3, 1649), (2000, 1), (7,)]

# Bytes of a record by columns, as worked out on paper.
LENGTHS = {
    "nf4": {3: 12, 33: 28, 64: 36, 65: 44, 96: 56, 127: 76, 200: 116, 768: 432, 4096: 2304},
    "nf4:nested": {3: 4, 33: 19, 64: 33, 65: 35, 96: 50, 127: 67, 200: 104, 768: 396, 4096: 2112},
    "int8:row": {3: 8, 33: 40, 64: 68, 65: 72, 96: 100, 127: 132, 200: 204, 768: 772, 4096: 4100},
}


def random_parts(storage: Storage, shape: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    """Any bits at all, since records are about bytes: NaN scales and spare nibbles too."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for _, dtype, sizes in storage.layout(shape):
        size = math.prod(sizes) * dtype.itemsize
        bits = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        parts.append(bits.view(dtype).view(sizes))
    return parts


def oracle(parts: list[Tensor], storage: Storage, shape: tuple[int, ...]) -> list[bytes]:
    """Records, one element at a time."""
    rows, columns = shape[0], math.prod(shape[1:])
    if not storage.flat:
        return [_plain_record(parts, row) for row in range(rows)]
    packed, scales = parts[0].view(-1).tolist(), parts[1]
    most = _most_blocks(columns, storage.block)
    records = []
    for row in range(rows):
        elements = range(row * columns, (row + 1) * columns)
        blocks = sorted({e // storage.block for e in elements})
        slots = b"".join(_bits(scales[block]) for block in blocks)
        slots = slots.ljust(most * scales.itemsize, b"\0")
        codes = [packed[e // 2] >> 4 if e % 2 == 0 else packed[e // 2] & 15 for e in elements]
        if columns % 2:
            spare = row == rows - 1 and rows % 2
            codes.append(packed[-1] & 15 if spare else 0)
        body = bytes(codes[i] << 4 | codes[i + 1] for i in range(0, len(codes), 2))
        record = slots + body
        records.append(record + b"\0" * (-len(record) % 4 if scales.itemsize == 4 else 0))
    return records


def _most_blocks(columns: int, block: int) -> int:
    touched = [
        ((row + 1) * columns - 1) // block - row * columns // block + 1 for row in range(block)
    ]
    return max(touched)


def _plain_record(parts: list[Tensor], row: int) -> bytes:
    scales = parts[1][row] if len(parts) > 1 and parts[1].dim() else None
    record = (b"" if scales is None else _bits(scales)) + _bits(parts[0][row])
    return record + b"\0" * (0 if scales is None else -len(record) % 4)


def _bits(values: Tensor) -> bytes:
    return bytes(values.contiguous().reshape(-1).view(torch.uint8).tolist())


def same_bits(a: Tensor, b: Tensor) -> bool:
    return _bits(a) == _bits(b)


def in_rows(parts: list[Tensor], storage: Storage, shape: tuple[int, ...]) -> list[Tensor]:
    return parts[: storage.in_rows]


@pytest.mark.parametrize("name", STORAGES)
def test_records_are_those_of_the_oracle(name: str) -> None:
    storage = Storage(name)
    for shape in [*((n, k) for n in (1, 2, 5) for k in COLUMNS), (4, 3, 3, 3), (7,)]:
        parts = random_parts(storage, shape)
        records = encode(parts, storage, shape, 0, shape[0])
        assert [_bits(record) for record in records] == oracle(parts, storage, shape), shape


@pytest.mark.parametrize("name", [*STORAGES, "f8_e5m2:row2"])
def test_flat_bytes_come_back(name: str) -> None:
    storage = Storage(name)
    for seed, shape in enumerate(SHAPES + WIDE):
        if name.endswith("row2") and len(shape) < 3:
            continue
        parts = random_parts(storage, shape, seed)
        records = encode(parts, storage, shape, 0, shape[0])
        assert records.shape == (shape[0], geometry(storage, shape).length)
        back = [
            torch.full_like(p.view(torch.uint8), 255).view(p.dtype) if p.dim() else p for p in parts
        ]
        decode(records, storage, shape, in_rows(back, storage, shape))
        for part, found in zip(in_rows(parts, storage, shape), back, strict=False):
            assert same_bits(part, found), shape


@pytest.mark.parametrize("name", STORAGES)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_process_encodes_and_decodes_its_rows_alone(name: str, world: int) -> None:
    storage = Storage(name)
    for shape in [(n, k) for n in (1, 3, 7, 9) for k in (3, 33, 64, 65, 200)]:
        parts = random_parts(storage, shape)
        whole = encode(parts, storage, shape, 0, shape[0])
        back = [torch.zeros_like(part) for part in in_rows(parts, storage, shape)]
        for rank in range(world):
            each = -(-shape[0] // world)
            first, last = min(rank * each, shape[0]), min((rank + 1) * each, shape[0])
            own = encode(parts, storage, shape, first, last)
            assert torch.equal(own, whole[first:last])
            alone = [torch.zeros_like(part) for part in in_rows(parts, storage, shape)]
            decode(own, storage, shape, alone, first)
            again = encode(alone, storage, shape, first, last)
            assert torch.equal(again, own)
            for into, piece in zip(back, alone, strict=True):
                view, found = into.view(-1).view(torch.uint8), piece.view(-1).view(torch.uint8)
                view |= found if not storage.flat or into is back[0] else 0
        assert storage.flat or all(same_bits(*pair) for pair in zip(back, parts, strict=False))
        assert same_bits(back[0], parts[0])


def test_torchao_records() -> None:
    storage = Storage("nf4:torchao:block16:scaler4:bf16")
    for shape in [(4, 64), (8, 96), (12, 64), (2, 1024), (256, 3)]:
        parts = random_parts(storage, shape)
        records = encode(parts, storage, shape, 0, shape[0])
        back = [torch.zeros_like(part) for part in parts[:2]]
        decode(records, storage, shape, back)
        assert all(same_bits(*pair) for pair in zip(back, parts, strict=False)), shape


@pytest.mark.parametrize(("name", "lengths"), LENGTHS.items())
def test_lengths(name: str, lengths: dict[int, int]) -> None:
    for columns, length in lengths.items():
        for rows in (1, 64, 1000):
            assert geometry(Storage(name), (rows, columns)).length == length


def test_no_bytes_are_added_where_blocks_fit_rows() -> None:
    assert geometry(Storage("nf4"), (1, 4096)).length / 4096 == 0.5625
    assert geometry(Storage("nf4:nested"), (1, 4096)).length / 4096 == 0.515625


def test_pieces_of_odd_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of an odd number of codes are unpacked a piece at a time."""
    monkeypatch.setattr("stowage._shard.records._PIECE", 64)
    storage = Storage("nf4")
    for shape in [(9, 7), (33, 5), (5, 129), (64, 1)]:
        parts = random_parts(storage, shape)
        records = encode(parts, storage, shape, 0, shape[0])
        assert [_bits(record) for record in records] == oracle(parts, storage, shape)
        back = [torch.zeros_like(part) for part in parts]
        decode(records, storage, shape, back)
        assert all(same_bits(*pair) for pair in zip(back, parts, strict=True))


class NothingCounted(TorchDispatchMode):
    """No op whose result has as many elements as some flags are set: a device would wait for it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        found = torch.utils._pytree.tree_leaves((args[1:], kwargs))
        by_flags = name.startswith("aten::index") and any(
            isinstance(t, Tensor) and t.dtype is torch.bool for t in found
        )
        assert not by_flags and "nonzero" not in name and "item" not in name, name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("columns", [33, 64, 65, 200])
@pytest.mark.parametrize("name", STORAGES)
def test_a_device_need_not_be_waited_for(name: str, columns: int) -> None:
    storage, shape = Storage(name), (9, columns)
    parts = random_parts(storage, shape)
    with NothingCounted():
        records = encode(parts, storage, shape, 0, 9)
        back = [torch.zeros_like(part) for part in parts]
        decode(records, storage, shape, in_rows(back, storage, shape))
    with pytest.raises(AssertionError), NothingCounted():
        parts[0].view(-1)[torch.zeros(parts[0].numel(), dtype=torch.bool)]


def test_no_rows() -> None:
    storage = Storage("nf4")
    parts = random_parts(storage, (3, 5))
    records = encode(parts, storage, (3, 5), 3, 3)
    assert records.shape == (0, geometry(storage, (3, 5)).length)
    decode(records, storage, (3, 5), parts, 3)

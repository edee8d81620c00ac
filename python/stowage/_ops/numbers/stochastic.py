# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding: codes of one of the two neighbouring values, the nearer one more often.

Scales are those of rounding to nearest. With v a value in fp32, s the scale that reading multiplies
by (1 for casts; a nested scale after its own rounding), r = fl(1 / s) and u = fl(v * r), clamped to
the largest values, let a <= u <= b be the neighbours in the storage's table. The code is b's where
x < fl((u - a) / (b - a)), else a's. A u within 2^-22 |t| of a table value t (2^-21 |t| where
reading rounds two products, of absmax) is that value: what dequantizing gave goes back to where it
was.

x of element i is 24 bits of a counter: splitmix64 of (key + (i + 1) * 0x9E3779B97F4A7C15), its
upper 24 bits over 2^24; key is the first 8 bytes (little-endian) of BLAKE2b of "<seed> <name>". So
the bytes depend on values, storage, seed and name alone: not on threads, chunks, order or device.
"""

from __future__ import annotations

import hashlib
from functools import cache

import torch
from torch import Tensor

from stowage._ops import library
from stowage._ops.errors import InvalidArgument, translated
from stowage._ops.numbers import ordered, scaled, superblocks
from stowage._ops.numbers.packing import pack
from stowage._ops.numbers.rounding import spans
from stowage._ops.storage import Storage

_FLOATS = {
    "f8_e4m3": torch.float8_e4m3fn,
    "f8_e5m2": torch.float8_e5m2,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
}
_CLOSE = 2.0**-22  # of the value: the error of dequantizing and dividing by the scale again
_ONE = {"f8_e4m3": 0x38, "f8_e5m2": 0x3C, "int8": 1}  # the code of 1


def key_of(seed: int, name: str) -> int:
    """What makes the random numbers of one weight."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _signed(number: int) -> int:
    number %= 1 << 64
    return number - (1 << 64) if number >> 63 else number


def _shifted(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def uniform(key: int, first: int, last: int, device: torch.device) -> Tensor:
    """Elements [first, last) of the stream of `key`: fp32 in [0, 1), multiples of 2^-24."""
    counter = torch.arange(first + 1, last + 1, dtype=torch.int64, device=device)
    z = counter * _signed(0x9E3779B97F4A7C15) + _signed(key)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    z = z ^ _shifted(z, 31)
    return _shifted(z, 40).to(torch.float32) * 2.0**-24


@cache
def _table(storage: Storage) -> tuple[Tensor, Tensor]:
    """The finite values in order, fp32, and their codes (as uint8 or int16). One zero."""
    if storage.values:
        codes = torch.arange(16, dtype=torch.uint8)
        values = torch.tensor(storage.values, dtype=torch.float32)
    elif storage.packing == "dense":
        codes = torch.arange(1 << storage.bits, dtype=torch.uint8)
        values = codes.to(torch.float32) - (1 << (storage.bits - 1))
    elif storage.codes == "int8":
        values = torch.arange(storage.least, storage.largest + 1, dtype=torch.float32)
        codes = values.to(torch.int8).view(torch.uint8)
    else:
        bits = torch.uint8 if storage.byte_codes else torch.int16
        span = torch.arange(256 if storage.byte_codes else 65536, dtype=torch.int32)
        codes = span.to(bits)
        values = codes.view(_FLOATS[storage.codes]).to(torch.float32)
    order = values.argsort(stable=True)  # +0 is before -0, whose code is larger
    values, codes = values[order], codes[order]
    keep = values.isfinite() & torch.cat([torch.tensor([True]), values[1:] != values[:-1]])
    return values[keep], codes[keep]


def quantize(
    values: Tensor, storage: Storage, key: int, first: int = 0, groups: Tensor | None = None
) -> list[Tensor]:
    """The parts of a weight, in the order of its layout, from fp32 `values`; value 0 is element
    `first` of the stream. `groups`: those of its columns, where a part names them. The peak is one
    fp32 tensor of that size beyond input and result. Raises InvalidArgument for NaN and infinity.
    """
    if values.dtype is not torch.float32:
        raise InvalidArgument(f"stowage: values to round must be float32, got {values.dtype}")
    try:
        if groups is None:
            parts = library.quantize(values.contiguous(), storage.key)
        else:
            parts = ordered.quantize(values, storage, groups)
        if storage.codes == "f32":
            return parts
        if storage.record:
            return _quantize_superblocks(values, storage, key, first, parts)
        if storage.zero:
            return _quantize_from_zero(values, storage, key, first, parts)
        scales = None if storage.kind == "none" else _scales(parts, storage, values)
    except RuntimeError as error:
        raise translated(error) from None
    grid, codes_of = (t.to(values.device) for t in _table(storage))
    close = _CLOSE if storage.factor == 1 else 2 * _CLOSE
    flat, out = values.reshape(-1), torch.empty(values.numel(), dtype=codes_of.dtype)
    out = out.to(values.device)
    for span in spans(flat.numel(), 1):
        scale = None if scales is None else scales.view(-1)[span]
        x = uniform(key, first + span.start, first + span.stop, values.device)
        out[span] = codes_of[_indices(flat[span], scale, grid, x, close)]
    return [_as_codes(out, parts[0], storage), *parts[1:]]


def _quantize_from_zero(
    values: Tensor, storage: Storage, key: int, first: int, parts: list[Tensor]
) -> list[Tensor]:
    """u is then clamped to [least - z, largest - z], and codes are those of numbers z more. Where
    zeros are numbers, see _moved()."""
    codes, scale, zero, *named = parts
    least, largest, args = storage.least, storage.largest, (storage.key, values.shape, values.dtype)
    scales = _scales([codes, scale, torch.zeros_like(zero), *named], storage, values)
    none = _all_of(codes, storage, 0)
    zeros = library.dequantize(none, [torch.ones_like(scale), zero, *named], *args)
    zeros = zeros if storage.zero == "sum" else -zeros
    grid = torch.arange(-storage.divisor, storage.divisor + 1).to(values)
    numbers_of, codes_of = (t.to(values.device) for t in _table(storage))
    flat, out = values.reshape(-1), codes.new_empty(values.numel())
    for span in spans(flat.numel(), 1):
        s, z = scales.view(-1)[span], zeros.view(-1)[span]
        x = uniform(key, first + span.start, first + span.stop, values.device)
        if storage.zero != "code":
            numbers = _moved(flat[span], s, z, x, storage)
            out[span] = codes_of[(numbers - numbers_of[0]).long()]
            continue
        u = (flat[span] * (torch.ones_like(s) / s)).clamp(least - z, largest - z)
        numbers = grid[_indices(u, None, grid, x)] + z
        out[span] = codes_of[(numbers - numbers_of[0]).long()]
    return [_as_codes(out, codes, storage), scale, zero, *named]


def _moved(v: Tensor, scale: Tensor, zero: Tensor, x: Tensor, storage: Storage) -> Tensor:
    """Numbers of codes: u is fl(fl(v * r) + w), w what moves values over their scales, clamped to
    the codes. A u within 2^-22 of the sum's larger term of a code is that code, and so is one whose
    nearest code reads as v."""
    product, shift = v * (torch.ones_like(scale) / scale), scaled.moved_by(zero, scale, storage)
    u = (product + shift).clamp(storage.least, storage.largest)
    near, close = u.round(), torch.maximum(product.abs(), shift.abs()) * _CLOSE
    same = scaled.value_of(near, scale, zero, storage) == v
    u = torch.where(same | ((u - near).abs() <= close), near, u)
    return u.floor() + (x < u - u.floor())


def _quantize_superblocks(
    values: Tensor, storage: Storage, key: int, first: int, parts: list[Tensor]
) -> list[Tensor]:
    """u is fl(fl(v * r) + fl(m * r)), m the offset or 0, clamped to the codes; r is 0 for a scale
    of 0. A u within 2^-22 of the sum's larger term of a code is that code."""
    codes, records = parts
    flat, out = values.reshape(-1), codes.new_empty(values.numel())
    length = flat.numel() // records.shape[0] if flat.numel() else 0
    scales, offsets = superblocks.steps(records, storage)
    zero = int(superblocks.of(storage).first_code)
    for span in spans(flat.numel(), 1):
        where = superblocks.step_at(records, storage, length, span)
        s = scales.view(-1)[where]
        m = torch.zeros_like(s) if offsets is None else offsets.view(-1)[where]
        r = torch.where(s == 0, 0.0, torch.ones_like(s) / s)
        product, shift = flat[span] * r, m * r
        u = (product + shift).clamp(storage.least, storage.largest)
        near, close = u.round(), torch.maximum(product.abs(), shift) * _CLOSE
        u = torch.where((u - near).abs() <= close, near, u)
        x = uniform(key, first + span.start, first + span.stop, values.device)
        out[span] = (u.floor() + (x < u - u.floor()) - zero).to(torch.uint8)
    return [_as_codes(out, codes, storage), records]


def _scales(parts: list[Tensor], storage: Storage, values: Tensor) -> Tensor:
    """The scale of every element: what a weight of ones reads as."""
    ones = _all_of(parts[0], storage, 1)
    return library.dequantize(ones, parts[1:], storage.key, values.shape, torch.float32)


def _all_of(codes: Tensor, storage: Storage, value: int) -> Tensor:
    """As many codes, of 0 or 1."""
    if storage.packing == "dense":
        ones = torch.full((8,), value + (1 << (storage.bits - 1)), dtype=torch.uint8)
        eight = pack(ones, storage.packing, storage.bits).to(codes.device)
        return eight.repeat(codes.numel() // len(eight)).view_as(codes)
    packed = bool(storage.values)
    code = storage.values.index(value) * 17 if packed else _ONE[storage.codes] * value
    return torch.full_like(codes, code)


def _indices(
    v: Tensor, scale: Tensor | None, grid: Tensor, x: Tensor, close: float = _CLOSE
) -> Tensor:
    if scale is not None:
        # A scale of zero is that of a block of zeros.
        v = torch.where(scale == 0, 0.0, v * (torch.ones_like(scale) / scale))
    u = v.clamp(float(grid[0]), float(grid[-1]))
    above = torch.searchsorted(grid, u).clamp(max=len(grid) - 1)
    below = (above - 1).clamp(min=0)
    a, b = grid[below], grid[above]
    up = x < (u - a) / torch.where(b == a, torch.ones_like(a), b - a)
    up = torch.where((u - a).abs() <= close * a.abs(), False, up)
    up = torch.where((u - b).abs() <= close * b.abs(), True, up)
    return torch.where(up, above, below)


def _as_codes(out: Tensor, like: Tensor, storage: Storage) -> Tensor:
    if storage.together == 1:
        return out.view(like.dtype).view(like.shape)
    if storage.packing == "dense":
        return pack(out, storage.packing, storage.bits).view(like.shape)
    zero = storage.values.index(0.0)
    pairs = torch.nn.functional.pad(out, (0, out.numel() % 2), value=zero)
    return pack(pairs, storage.packing).view(like.shape)

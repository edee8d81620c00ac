# SPDX-License-Identifier: Apache-2.0
"""Quantizing and dequantizing by stock torch ops: the same bytes as the kernels, on any device.

Rules of this file: values are computed in fp32; the only things done to a bf16 or float8 tensor are
casts, views and copies (their arithmetic is missing or wrong on old hardware); a tensor is divided
by a tensor, since CUDA turns division by a number into a multiplication; temporaries stay small.
"""

import math
import struct
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from stowage._errors import fail
from stowage._storage import Storage

CHUNK = 1 << 20  # elements that are worked on at once
_TINY = 2.0**-126  # no scale is smaller
_FLOAT8 = {"f8_e4m3": torch.float8_e4m3fn, "f8_e5m2": torch.float8_e5m2}
_NAN_BITS = {torch.bfloat16: (16, 0x7FFF, 0x40), torch.float16: (13, 0x3FF, 0x7E00)}
_NAMES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, **_FLOAT8}


def rows_of(shape: Sequence[int]) -> int:
    return shape[0] if len(shape) else 1


def row_elements(shape: Sequence[int]) -> int:
    return math.prod(shape[1:])


def spans(count: int, width: int) -> Iterator[slice]:
    """Slices of range(count) whose items, each of `width` elements, fill about one chunk."""
    step = max(1, CHUNK // max(1, width))
    return (slice(i, min(i + step, count)) for i in range(0, count, step))


def _round_to_odd(x: Tensor) -> Tensor:
    """f64 to fp32 so that a second rounding, to fewer bits, gives what one rounding would."""
    near = x.to(torch.float32)
    bits = near.view(torch.int32)
    wide = near.to(torch.float64)
    move = torch.where(wide.abs() > x.abs(), -1, 1).to(torch.int32)
    inexact = (wide != x) & ~torch.isnan(x) & (bits & 1 == 0)
    return torch.where(inexact, bits + move, bits).view(torch.float32)


def _check_finite(x: Tensor, first: int) -> None:
    finite = torch.isfinite(x)
    if not bool(finite.all()):
        index = int((~finite).nonzero()[0])
        fail(
            "invalid_argument",
            f"quantize: values must be finite, got {float(x[index])} at element {first + index}",
        )


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def round_once(v: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 values as a reader sees them; any NaN is the one quiet NaN."""
    return _narrow(torch.where(torch.isnan(v), math.nan, v), dtype)


def _narrow(v: Tensor, dtype: torch.dtype) -> Tensor:
    """NaN keeps its sign and upper bits, which torch's casts do not promise."""
    out = v.to(dtype)
    if dtype not in _NAN_BITS or not bool(torch.isnan(v).any()):
        return out
    shift, mask, quiet = _NAN_BITS[dtype]
    bits = v.view(torch.int32)
    nan = (bits >> 16 & 0x8000) | (bits >> shift & mask) | quiet
    kept = torch.where(torch.isnan(v), nan.to(torch.int16), out.view(torch.int16))
    return kept.view(dtype)


# --- casts --------------------------------------------------------------------------------------


def _cast(x: Tensor, storage: Storage, keep: bool) -> Tensor:
    target = _NAMES[storage.codes]
    if x.dtype == target:
        return x
    odd = x.dtype == torch.float64 and target != torch.float32
    v = _round_to_odd(x) if odd else _wide(x)
    clamped = v.clamp(-storage.largest, storage.largest)
    if keep:
        if target == torch.float8_e4m3fn:  # it has no inf
            v = torch.where(torch.isinf(v), torch.full_like(v, math.nan).copysign(v), v)
        clamped = torch.where(torch.isfinite(v), clamped, v)
    return _narrow(clamped, target)


def _quantize_cast(x: Tensor, storage: Storage, keep: bool) -> list[Tensor]:
    codes = torch.empty(x.shape, dtype=storage.codes_dtype, device=x.device)
    flat, out = x.reshape(-1), codes.view(-1)
    for span in spans(flat.numel(), 1):
        if not keep:
            _check_finite(_wide(flat[span]), span.start)
        cast = _cast(flat[span], storage, keep)
        out[span].copy_(cast if storage.bits > 8 else cast.view(torch.uint8))
    return [codes]


# --- 8-bit codes with scales --------------------------------------------------------------------


def _scale_of(amax: Tensor, largest: float) -> Tensor:
    scale = (amax / torch.full_like(amax, largest)).clamp(min=_TINY)
    return torch.where(amax == 0, torch.ones_like(scale), scale)


def encode8(v: Tensor, scale: Tensor, storage: Storage) -> Tensor:
    inverse = torch.ones_like(scale) / scale
    scaled = (v * inverse).clamp(-storage.largest, storage.largest)
    if storage.codes == "int8":
        return scaled.round().to(torch.int8).view(torch.uint8)
    return scaled.to(_FLOAT8[storage.codes]).view(torch.uint8)


def _decode8(codes: Tensor, storage: Storage) -> Tensor:
    if storage.codes == "int8":
        return codes.view(torch.int8).to(torch.float32)
    return codes.view(_FLOAT8[storage.codes]).to(torch.float32)


def _quantize_tensor_scale(x: Tensor, storage: Storage) -> list[Tensor]:
    flat = x.reshape(-1)
    amax = torch.zeros((), dtype=torch.float32, device=x.device)
    for span in spans(flat.numel(), 1):
        v = flat[span].to(torch.float32)
        _check_finite(v, span.start)
        amax = torch.maximum(amax, v.abs().amax())
    scale = _scale_of(amax, storage.largest)
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    for span in spans(flat.numel(), 1):
        codes.view(-1)[span].copy_(encode8(flat[span].to(torch.float32), scale, storage))
    return [codes, scale]


def _quantize_groups(x: Tensor, storage: Storage) -> list[Tensor]:
    """row, row2 and block: groups of `width` elements inside rows of `length`."""
    (_, _, shape), (_, _, scale_shape) = storage.layout(x.shape)
    codes = torch.empty(shape, dtype=torch.uint8, device=x.device)
    scale = torch.empty(scale_shape, dtype=torch.float32, device=x.device)
    rows = scale_shape[0] if storage.kind == "block" else scale.numel()
    length = x.numel() // rows if rows else 0
    width = storage.block or length
    if not codes.numel():
        return [codes, scale.fill_(1)]
    flat, out, scales = x.reshape(rows, length), codes.view(rows, length), scale.view(rows, -1)
    for span in spans(rows, length):
        v = flat[span].to(torch.float32)
        _check_finite(v.reshape(-1), span.start * length)
        grouped = torch.nn.functional.pad(v, (0, -length % width)).view(len(v), -1, width)
        scales[span].copy_(_scale_of(grouped.abs().amax(2), storage.largest))
        coded = encode8(grouped, scales[span, :, None], storage)
        out[span].copy_(coded.view(len(v), -1)[:, :length])
    return [codes, scale]


# --- 4-bit codes --------------------------------------------------------------------------------


@cache
def _thresholds(storage: Storage, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Values by code; the midpoints between ascending values; the code of each ascending value."""
    values = torch.tensor(storage.values, dtype=torch.float32)
    ascending, order = values.sort(stable=True)
    middle = (ascending[:-1] + ascending[1:]) * 0.5
    return values.to(device), middle.to(device), order.to(torch.uint8).to(device)


def encode4(v: Tensor, storage: Storage) -> Tensor:
    _, middle, order = _thresholds(storage, v.device)
    # A value on a midpoint takes the lower code; NaN takes the last.
    return order[torch.bucketize(v, middle, out_int32=True)]


def _quantize4(x: Tensor, storage: Storage, keep: bool) -> list[Tensor]:
    block, count = storage.block, x.numel()
    codes = torch.empty(((count + 1) // 2, 1), dtype=torch.uint8, device=x.device)
    absmax = torch.empty((count + block - 1) // block, dtype=torch.float32, device=x.device)
    flat, out = x.reshape(-1), codes.view(-1)
    for span in spans(absmax.numel(), block):
        v = flat[span.start * block : span.stop * block].to(torch.float32)
        if not keep:
            _check_finite(v, span.start * block)
        full = len(v) // block
        grouped = v[: full * block].view(full, block)
        largest = grouped.abs().amax(1)
        largest = torch.where(torch.isnan(largest), math.nan, largest)  # one NaN, not any
        absmax[span.start : span.start + full].copy_(largest)
        floor = absmax[span.start : span.start + full, None].clamp(min=1e-38)
        scaled = (grouped * (torch.ones_like(floor) / floor)).clamp(-1, 1).view(-1)
        if tail := len(v) % block:  # bitsandbytes divides here, and keeps the clamped scale
            last = v[-tail:].abs().amax().clamp(min=1e-38)
            absmax[-1].copy_(last)
            scaled = torch.cat([scaled, (v[-tail:] / last).clamp(-1, 1)])
        coded = encode4(torch.nn.functional.pad(scaled, (0, len(v) % 2)), storage)
        start = span.start * block // 2
        out[start : start + len(coded) // 2].copy_(coded[0::2] * 16 + coded[1::2])
    return [codes, absmax] if not storage.nested else [codes, *_nest(absmax)]


def _f32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


@cache
def nested_map(device: torch.device) -> Tensor:
    """The 256 values of an 8-bit block scale: bitsandbytes' dynamic map, CRC-32 1b137aeb.

    Each product and sum below is exact in fp64, so that _f32 rounds once.
    """
    values = [0.0, 1.0]
    for i in range(7):
        points, start = 2**i + 1, _f32(0.1)
        step = _f32(_f32(1 - start) / (points - 1))
        line = [
            _f32(start + step * k) if k < points // 2 else _f32(1 - step * (points - 1 - k))
            for k in range(points)
        ]
        for low, high in pairwise(line):
            value = _f32(_f32(10.0 ** (i - 6)) * _f32(_f32(low + high) / 2))
            values += [value, -value]
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


@cache
def _nested_codes(device: torch.device) -> Tensor:
    """The code of each of 65,536 points between -1 and 1 (bitsandbytes >= 0.50 on the CPU)."""
    table = nested_map(torch.device("cpu"))
    middle = (table[:-1] + table[1:]) * 0.5
    points = torch.arange(65536, dtype=torch.float32) * 2
    points = points / torch.full_like(points, 65535) - 1
    return torch.bucketize(points, middle, out_int32=True).to(torch.uint8).to(device)


def _nest(absmax: Tensor) -> list[Tensor]:
    count, device = absmax.numel(), absmax.device
    total = absmax.cpu().to(torch.float64).cumsum(0)[-1:]  # in index order
    mean = float(total[0]) / count if count else 0.0
    offset = torch.tensor(mean, dtype=torch.float32, device=device)
    grouped = torch.nn.functional.pad(absmax - offset, (0, -count % 256)).view(-1, 256)
    largest = grouped.abs().amax(1) if count else grouped.new_empty(0)
    inverse = torch.ones_like(largest) / largest
    unit = (grouped * inverse[:, None]).clamp(-1, 1)
    point = ((unit + 1) * 0.5 * 65535 + 0.5).to(torch.int32).clamp(0, 65535)
    codes = torch.where(largest[:, None] == 0, 0, _nested_codes(device)[point])
    return [codes.to(torch.uint8).view(-1)[:count], largest, nested_map(device).clone(), offset]


def block_scales(parts: Sequence[Tensor], blocks: slice) -> Tensor:
    if len(parts) == 2:
        return parts[1][blocks]
    _, absmax, nested, table, offset = parts
    index = torch.arange(blocks.start, blocks.stop, device=absmax.device) // 256
    return table[absmax[blocks].to(torch.int32)] * nested[index] + offset


def _decode4(parts: Sequence[Tensor], storage: Storage, first: int, last: int) -> Tensor:
    """Elements [first, last) of the flat weight."""
    table, _, _ = _thresholds(storage, parts[0].device)
    packed = parts[0].view(-1)[first // 2 : (last + 1) // 2]
    pairs = torch.stack([packed >> 4, packed & 15], 1).view(-1)
    codes = pairs[first % 2 : first % 2 + last - first].to(torch.int32)
    blocks = slice(first // storage.block, -(-last // storage.block))
    scales = block_scales(parts, blocks).repeat_interleave(storage.block)
    return table[codes] * scales[first - blocks.start * storage.block :][: last - first]


# --- the two doors ------------------------------------------------------------------------------


def quantize(x: Tensor, storage: Storage, keep_nonfinite: bool) -> list[Tensor]:
    if storage.bits == 4:
        return _quantize4(x, storage, keep_nonfinite and not storage.nested)
    if storage.kind == "none":
        return _quantize_cast(x, storage, keep_nonfinite)
    return (_quantize_tensor_scale if storage.kind == "tensor" else _quantize_groups)(x, storage)


def values(parts: Sequence[Tensor], storage: Storage, shape: Sequence[int], rows: slice) -> Tensor:
    """Rows of dim 0 as fp32, [rows, elements of a row], before the one rounding."""
    length = row_elements(shape)
    count = rows.stop - rows.start
    if storage.bits == 4:
        return _decode4(parts, storage, rows.start * length, rows.stop * length).view(count, length)
    codes = parts[0].reshape(-1, length)[rows] if length else parts[0].reshape(count, 0)
    if storage.bits > 8:
        return codes.to(torch.float32)
    v = _decode8(codes, storage)
    if storage.kind == "none" or not v.numel():
        return v
    if storage.kind == "tensor":
        return v * parts[1]
    scale = parts[1].reshape(rows_of(shape), -1)[rows]
    width = storage.block or length // scale.shape[1]
    return v * scale.repeat_interleave(width, 1)[:, :length]


def pick(parts: Sequence[Tensor], storage: Storage, shape: Sequence[int], ids: Tensor) -> Tensor:
    """The rows `ids` as fp32, [ids, elements of a row]."""
    rows, length = rows_of(shape), row_elements(shape)
    if storage.bits == 4:
        index = ids[:, None] * length + torch.arange(length, device=ids.device)
        packed = parts[0].view(-1)[index >> 1]
        codes = torch.where(index & 1 == 1, packed & 15, packed >> 4).to(torch.int32)
        blocks = slice(0, parts[1].numel())
        return (
            _thresholds(storage, ids.device)[0][codes]
            * block_scales(parts, blocks)[index // storage.block]
        )
    codes = parts[0].view(rows, length)
    bits = codes.view(torch.int16) if storage.bits == 16 else codes
    lines = [bits[ids].view(codes.dtype)]
    if storage.kind != "none":
        scale = parts[1] if storage.kind == "tensor" else parts[1].reshape(rows, -1)[ids]
        lines.append(scale)
    picked = (len(ids), *shape[1:])
    return values(lines, storage, picked, slice(0, len(ids)))

# SPDX-License-Identifier: Apache-2.0
"""Quantizing and dequantizing by stock torch ops: the same bytes as the kernels, on any device."""

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from stowage._ops.errors import fail
from stowage._ops.numbers import float8, packing, superblocks, torchao
from stowage._ops.numbers.four_bit import block_scales, decode4, quantize4, thresholds
from stowage._ops.numbers.packing import pack, unpack
from stowage._ops.numbers.rounding import (
    check_finite,
    narrow,
    round_to_odd,
    row_elements,
    rows_of,
    spans,
    widen,
)
from stowage._ops.storage import Storage

_TINY = 2.0**-126  # no scale is smaller
SLACK = 1 + 2.0**-20  # quantizing with a rounded scale may exceed the largest code by this
_E4M3 = (2.0**-9, 448.0)  # its least number above 0, and its largest
_NAMES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


# --- casts --------------------------------------------------------------------------------------


def _cast(x: Tensor, storage: Storage, keep: bool) -> Tensor:
    target = _NAMES.get(storage.codes)  # None: float8
    if x.dtype == target:
        return x
    odd = x.dtype == torch.float64 and target != torch.float32
    v = round_to_odd(x) if odd else widen(x)
    clamped = v.clamp(-storage.largest, storage.largest)
    if keep:
        if storage.codes == "f8_e4m3":  # it has no inf
            v = torch.where(torch.isinf(v), torch.full_like(v, math.nan).copysign(v), v)
        clamped = torch.where(torch.isfinite(v), clamped, v)
    return float8.encoded(clamped, storage.codes) if target is None else narrow(clamped, target)


def _quantize_cast(x: Tensor, storage: Storage, keep: bool) -> list[Tensor]:
    codes = torch.empty(x.shape, dtype=storage.codes_dtype, device=x.device)
    flat, out = x.reshape(-1), codes.view(-1)
    for span in spans(flat.numel(), 1):
        if not keep:
            check_finite(widen(flat[span]), span.start)
        out[span].copy_(_cast(flat[span], storage, keep))
    return [codes]


# --- codes with scales of the largest value -----------------------------------------------------


def _scale_of(amax: Tensor, divisor: float) -> Tensor:
    scale = (amax / torch.full_like(amax, divisor)).clamp(min=_TINY)
    return torch.where(amax == 0, torch.ones_like(scale), scale)


def _check_scales(scale: Tensor, most: float, storage: Storage) -> None:
    if bool((scale > most).any()):
        text = f"quantize: values must have finite scales in {storage}, got infinity"
        fail("invalid_argument", text)


def outer_of(amax: Tensor, storage: Storage) -> Tensor:
    """The number over scales of values whose largest magnitude this is."""
    most = torch.full_like(amax, storage.divisor * _E4M3[1])
    if storage.scale_code == "quotient":
        exact = (most / amax).clamp(max=_E4M3[0] / _TINY)
    else:
        exact = (amax / most).clamp(min=_TINY / _E4M3[0])
    return torch.where(amax == 0, 1.0, exact)


def _under_one(scale: Tensor, outer: Tensor, storage: Storage) -> Tensor:
    """What e4m3 scales are under the numbers over them."""
    if storage.scale_code == "quotient":
        return scale / outer
    if storage.scale_code == "product_bf16":
        exact = scale * outer.to(torch.bfloat16).to(torch.float32)
        return exact.to(torch.bfloat16).to(torch.float32)
    return scale * outer


def _over(outer: Tensor, groups: int, storage: Storage) -> Tensor:
    """What stands over the scales of each of so many groups of rows: [rows, groups], [rows, 1] or
    []."""
    if not storage.under_rows:
        return outer
    lines = outer.reshape(outer.shape[0], math.prod(outer.shape[1:]))
    each = groups // max(lines.shape[1], 1)
    return lines if lines.shape[1] == 1 else lines.repeat_interleave(each, 1)


def scales_and_zeros(
    lo: Tensor, hi: Tensor, storage: Storage, outer: Tensor | None = None
) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """The parts beside the codes of groups whose values reach from `lo` <= 0 to `hi` >= 0; their
    scales in fp32, and what moves values over them."""
    if not storage.zero:
        kept, used = _kept(torch.maximum(-lo, hi), storage, outer)
        return [kept], used, None
    scale = _scale_of(hi - lo, storage.divisor)
    _check_scales(scale, torch.finfo(torch.float32).max, storage)
    kept, used = _typed(scale, storage)
    zero = _zeros(lo, scale, storage)
    return [kept, zero], used, moved_by(zero, used, storage)


def _zeros(lo: Tensor, scale: Tensor, storage: Storage) -> Tensor:
    """What stands for 0 in groups that begin at `lo` <= 0, under exact scales."""
    if storage.zero == "code":
        zero = (storage.least - lo / scale).clamp(storage.least, storage.largest).round()
        return zero.to(torch.int8)
    if storage.zero == "rounded":
        zero = (0 - lo / scale).clamp(storage.least, storage.largest)  # no -0
    else:
        zero = lo - storage.least * scale
        _check_scales(zero.abs(), torch.finfo(storage.type_dtype).max, storage)
    return narrow(zero, storage.type_dtype)


def moved_by(zero: Tensor, scale: Tensor, storage: Storage) -> Tensor:
    """What is added to values over their scales before they become codes."""
    number = zero.to(torch.float32)
    return -number * (torch.ones_like(scale) / scale) if storage.zero == "sum" else number


def value_of(v: Tensor, scale: Tensor, zero: Tensor | None, storage: Storage) -> Tensor:
    """What codes stand for that have the values `v` in the table, before the one rounding."""
    if zero is None:
        return v * scale if storage.factor == 1 else v * scale * storage.factor
    number = zero.to(torch.float32)
    if storage.zero == "sum":
        return v * scale + number
    if storage.zero == "code":
        return (v - number) * scale
    distance = (v - number).to(storage.type_dtype).to(torch.float32)
    return (distance * scale).to(storage.type_dtype).to(torch.float32)


def _typed(scale: Tensor, storage: Storage) -> tuple[Tensor, Tensor]:
    """Scales in their type, and what they are then."""
    if storage.scale_type == "f16":
        _check_scales(scale, 65504, storage)
        # Subnormal numbers are few: the least that is no smaller keeps codes next to the largest.
        scale = torch.where(scale < 2.0**-14, (scale * 2.0**24).ceil() * 2.0**-24, scale)
    kept = narrow(scale, storage.type_dtype)
    return kept, kept.to(torch.float32)


def _kept(amax: Tensor, storage: Storage, outer: Tensor | None) -> tuple[Tensor, Tensor]:
    """The scales of groups as the storage keeps them, and what they are then: of e8m0, whose part
    is uint8, a power of two; of e4m3, which is uint8 too, what they are under `outer`."""
    if outer is not None:
        if storage.scale_code == "quotient":
            exact = amax * outer / torch.full_like(amax, storage.divisor)
        else:
            exact = amax / (storage.divisor * outer)
        nearest = float8.encoded(torch.where(exact == 0, 1.0, exact.clamp(*_E4M3)), "f8_e4m3")
        return nearest, _under_one(float8.decoded(nearest, "f8_e4m3"), outer, storage)
    if storage.scale_code == "absmax":
        kept = torch.where(amax == 0, 0.0, amax.clamp(min=storage.divisor * _TINY))
        return kept, kept
    scale = _scale_of(amax, storage.divisor)
    if storage.scale_type != "e8m0":
        return _typed(scale, storage)
    exponent = (scale.view(torch.int32) + 0x7FFFFF) >> 23
    if storage.powers == "floor":
        less = math.frexp(storage.largest)[1] - 1
        floor = ((amax.view(torch.int32) >> 23) - less).clamp(min=1)
        exponent = torch.where(amax == 0, exponent, floor)
    return exponent.to(torch.uint8), (exponent << 23).view(torch.float32)


def numbers(kept: Tensor, storage: Storage, shared: Sequence[Tensor] = ()) -> Tensor:
    """Scales in fp32 from how they are kept, and the parts behind them."""
    if storage.under_one:
        over = _over(shared[0], kept.shape[-1], storage)
        return _under_one(float8.decoded(kept, "f8_e4m3"), over, storage)
    if storage.scale_type != "e8m0":
        return kept.to(torch.float32)
    exponent = kept.to(torch.int32)
    power = torch.where(exponent == 0, 2.0**-127, (exponent << 23).view(torch.float32))
    return torch.where(exponent == 255, math.nan, power)


def largest_shared(parts: Sequence[Tensor], storage: Storage) -> Tensor:
    """The largest scale that a group may have under what all rows share."""
    if storage.under_one:
        return _under_one(torch.full_like(parts[2], _E4M3[1]), parts[2], storage)
    return numbers(parts[1], storage) * storage.factor


def _ranks(v: Tensor) -> Tensor:
    """Integers in the order of fp32 numbers, -0 before 0."""
    bits = v.contiguous().view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@cache
def _order(storage: Storage, device: torch.device) -> tuple[Tensor, Tensor]:
    """The codes of sixteen values in ascending order, and between two of them the rank of the last
    number whose code is the lower one."""
    values = torch.tensor(storage.values, dtype=torch.float32)
    codes = _ranks(values).sort(stable=True).indices
    ascending = values[codes].to(torch.float64)
    middle = (ascending[:-1] + ascending[1:]) * 0.5
    nearest = middle.to(torch.float32)
    upper_wins = (codes[:-1] % 2 == 1) & (codes[1:] % 2 == 0) | (ascending[:-1] == ascending[1:])
    beyond = (nearest > middle) | (nearest == middle) & upper_wins
    return codes.to(torch.uint8).to(device), (_ranks(nearest) - beyond.to(torch.int32)).to(device)


def _encode4(v: Tensor, storage: Storage) -> Tensor:
    """The nearest of sixteen values; of two as near that whose code is even, of two zeros that of
    the same sign."""
    codes, last = _order(storage, v.device)
    return pack(codes[torch.bucketize(_ranks(v), last, out_int32=True)], storage.packing)


def pack_integers(v: Tensor, storage: Storage) -> Tensor:
    """Integers, as their codes lie densely."""
    return pack((v + _half(storage)).to(torch.uint8), storage.packing, storage.bits)


def _half(storage: Storage) -> int:
    """Of the codes: as much more is the code of an integer."""
    return 1 << (storage.bits - 1)


def encode(v: Tensor, scale: Tensor, storage: Storage, zero: Tensor | None = None) -> Tensor:
    """Codes as they rest: packed ones are half as many in the last dimension."""
    divides = storage.under_one
    if storage.scale_code == "absmax":
        scaled = v * torch.where(scale == 0, 0.0, torch.ones_like(scale) / scale * storage.divisor)
    else:
        scaled = v / scale if divides else v * (torch.ones_like(scale) / scale)
    scaled = scaled if zero is None else scaled + zero
    scaled = scaled.clamp(storage.least, storage.largest)
    if storage.values:
        return _encode4(scaled, storage)
    if storage.packing == "dense":
        return pack_integers(scaled.round(), storage)
    if storage.codes == "int8":
        return scaled.round().to(torch.int8).view(torch.uint8)
    return float8.encoded(scaled, storage.codes)


@cache
def _values(storage: Storage, device: torch.device) -> Tensor:
    """By code. Kept there: making them copies to the device, which waits."""
    return torch.tensor(storage.values, dtype=torch.float32, device=device)


def _decode(codes: Tensor, storage: Storage) -> Tensor:
    if storage.packing == "dense":
        codes = unpack(codes, storage.packing, storage.bits)
        return codes.to(torch.float32) - _half(storage)
    if storage.values:
        return _values(storage, codes.device)[unpack(codes, storage.packing).to(torch.int32)]
    if storage.codes == "int8":
        return codes.view(torch.int8).to(torch.float32)
    return float8.decoded(codes, storage.codes)


def _reach(flat: Tensor) -> tuple[Tensor, Tensor]:
    """How far values go below 0 and above it."""
    lo = hi = torch.zeros((), dtype=torch.float32, device=flat.device)
    for span in spans(flat.numel(), 1):
        v = flat[span].to(torch.float32)
        check_finite(v, span.start)
        lo, hi = torch.minimum(lo, v.amin()), torch.maximum(hi, v.amax())
    return lo, hi


def _quantize_tensor_scale(x: Tensor, storage: Storage) -> list[Tensor]:
    flat = x.reshape(-1)
    lo, hi = _reach(flat)
    parts, scale, zero = scales_and_zeros(lo, hi, storage)
    codes = torch.empty(storage.layout(x.shape)[0][2], dtype=torch.uint8, device=x.device)
    together = storage.together
    filled, out = flat.view(-1, together), codes.view(-1, storage.bytes_of(together))
    for span in spans(len(out), together):
        out[span].copy_(encode(filled[span].to(torch.float32), scale, storage, zero))
    return [codes, *parts]


def _outers(x: Tensor, like: Tensor, storage: Storage) -> Tensor:
    """What stands over the scales of each row, or pair of indices."""
    count = like.numel()
    lines, most = x.reshape(count, x.numel() // max(count, 1)), torch.zeros_like(like)
    for span in spans(count if x.numel() else 0, lines.shape[1]):
        v = lines[span].to(torch.float32)
        check_finite(v.reshape(-1), span.start * lines.shape[1])
        most.view(-1)[span] = v.abs().amax(1)
    return outer_of(most, storage)


def quantize_groups(x: Tensor, storage: Storage, outer: Tensor | None = None) -> list[Tensor]:
    """row, row2 and blocks: groups of `width` elements in each of `each` rows of `length`. In
    blocks of rows a stack is quantized by matrices.

    `outer`: what stands over the scales, where something does; without, that of these values."""
    if storage.by_columns:
        return _quantize_columns(x, storage)
    codes, *rest = (
        torch.empty(sizes, dtype=dtype, device=x.device)
        for _, dtype, sizes in storage.layout(x.shape)
    )
    shared: list[Tensor] = []
    if storage.under_one_of_all:
        if outer is None:
            lo, hi = _reach(x.reshape(-1))
            outer = outer_of(torch.maximum(-lo, hi), storage)
        *rest, shared = *rest[:-1], [outer]
    elif storage.under_rows:
        *rest, outers = rest
        if outer is None:
            outer = _outers(x, outers, storage)
        shared = [outers.copy_(outer)]
    rows = x.shape[0] if storage.block else rest[0].numel()
    length, each = (x.numel() // rows if rows else 0), storage.rows or 1
    width = storage.block or length
    if storage.rows and x.dim() == 3 and codes.numel():
        _reach(x.reshape(-1))  # what is not finite stands where the caller has it
        for i, matrix in enumerate(x):
            for into, part in zip([codes, *rest], quantize_groups(matrix, storage), strict=True):
                into[i] = part.reshape(into[i].shape)
        return [codes, *rest]
    if not codes.numel():
        none = torch.zeros(rest[0].shape)
        over = None if outer is None else _over(outer, none.shape[-1], storage)
        made, _, _ = scales_and_zeros(none, none, storage, over)
        return [codes, *(into.copy_(part) for into, part in zip(rest, made, strict=True)), *shared]
    flat, out = x.reshape(rows, length), codes.view(rows, storage.bytes_of(length))
    grids = [part.view(-(-rows // each), -1) for part in rest]
    for span in spans(len(grids[0]), length * each):
        lines = slice(span.start * each, span.stop * each)
        v = flat[lines].to(torch.float32)
        check_finite(v.reshape(-1), lines.start * length)
        padded = torch.nn.functional.pad(v, (0, -length % width, 0, -len(v) % each))
        grouped = padded.view(-1, each, padded.shape[1] // width, width)
        lo, hi = grouped.amin((1, 3)).clamp(max=0), grouped.amax((1, 3)).clamp(min=0)
        over = None
        if outer is not None:
            over = _over(outer[span] if storage.under_rows else outer, lo.shape[1], storage)
        made, used, zero = scales_and_zeros(lo, hi, storage, over)
        for grid, part in zip(grids, made, strict=True):
            grid[span].copy_(part)
        from_zero = None if zero is None else zero[:, None, :, None]
        coded = encode(grouped, used[:, None, :, None], storage, from_zero).view(len(padded), -1)
        out[lines].copy_(coded[: len(v), : out.shape[1]])
    return [codes, *rest, *shared]


def _quantize_columns(x: Tensor, storage: Storage) -> list[Tensor]:
    """Groups of elements that lie as far apart as there are groups."""
    codes, *rest = (
        torch.empty(sizes, dtype=dtype, device=x.device)
        for _, dtype, sizes in storage.layout(x.shape)
    )
    _reach(x.reshape(-1))  # what is not finite stands where the caller has it
    apart, columns = rest[0].shape
    lines = x.reshape(storage.block, apart, columns)
    out = codes.view(storage.block, apart, codes.shape[1])
    for span in spans(apart, x.shape[0] * columns):
        v = lines[:, span].to(torch.float32)
        made, used, zero = scales_and_zeros(v.amin(0).clamp(max=0), v.amax(0).clamp(min=0), storage)
        for into, part in zip(rest, made, strict=True):
            into[span] = part
        out[:, span] = encode(v, used, storage, zero)
    return [codes, *rest]


# --- the two doors ------------------------------------------------------------------------------


def quantize(x: Tensor, storage: Storage, keep_nonfinite: bool) -> list[Tensor]:
    if storage.transposed:
        flat = x.reshape(-1)
        for span in spans(flat.numel(), 1):  # what is not finite stands where the caller has it
            check_finite(widen(flat[span]), span.start)
        return quantize(x.transpose(1, 2).contiguous(), storage.lying, keep_nonfinite)
    match storage.codec:
        case "ggml":
            return superblocks.quantize(x, storage)
        case "torchao":
            return torchao.quantize(x, storage)
        case "bitsandbytes":
            return quantize4(x, storage, keep_nonfinite and not storage.nested)
        case "cast":
            return _quantize_cast(x, storage, keep_nonfinite)
        case "amax":
            whole = storage.kind == "tensor"
            return (_quantize_tensor_scale if whole else quantize_groups)(x, storage)
    raise AssertionError(f"no codec {storage.codec}")


def _lying(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a stack of matrices, the shape in which it lies transposed."""
    return (shape[0], shape[2], shape[1])


def _turned(lines: Tensor, shape: Sequence[int]) -> Tensor:
    """Matrices as the weight has them, each a line, from lines of them as they lie."""
    matrices = lines.view(len(lines), shape[2], shape[1])
    return matrices.transpose(1, 2).reshape(len(lines), row_elements(shape))


def values(parts: Sequence[Tensor], storage: Storage, shape: Sequence[int], rows: slice) -> Tensor:
    """Rows of dim 0 as fp32 (nf4:torchao:f64: fp64), [rows, elements of a row], before the one
    rounding."""
    if storage.transposed:
        return _turned(values(parts, storage.lying, _lying(shape), rows), shape)
    length = row_elements(shape)
    count = rows.stop - rows.start
    if storage.codec == "torchao":
        index = torch.arange(rows.start * length, rows.stop * length, device=parts[0].device)
        return torchao.decode(parts, storage, index).view(count, length)
    if storage.flat:
        return decode4(parts, storage, rows.start * length, rows.stop * length).view(count, length)
    wide = storage.bytes_of(length)
    codes = parts[0].reshape(-1, wide)[rows] if length else parts[0].reshape(count, 0)
    if storage.holds_values:
        return codes.to(torch.float32)
    which = torch.arange(rows.start, rows.stop, device=codes.device)
    return _scaled(codes, parts, storage, shape, which)


def _scaled(
    codes: Tensor, parts: Sequence[Tensor], storage: Storage, shape: Sequence[int], which: Tensor
) -> Tensor:
    """The values of `codes`, those of these rows: [rows, elements of a row]."""
    v = _decode(codes, storage)
    if storage.kind == "none" or not v.numel():
        return v
    if storage.record:
        scale, offset = superblocks.spread(parts[1][which], storage, v.shape[1])
        return v * scale if offset is None else v * scale - offset  # an exact product

    def spread_blocks(part: Tensor) -> Tensor:
        each = storage.rows_together(shape)
        if each == 1:  # of each matrix
            own = part[which].repeat_interleave(storage.rows, 1)[:, : shape[-2]]
        else:
            own = part[which // each]
        return own.repeat_interleave(storage.block, -1)[..., : shape[-1]].reshape(v.shape)

    def spread(part: Tensor) -> Tensor:
        """Of each element, from one of each group."""
        if storage.kind == "tensor":
            return part
        if storage.rows:
            return spread_blocks(part)
        if storage.by_columns:
            return part[which % part.shape[0]]
        own = part.reshape(rows_of(shape), -1)[which]
        if storage.actorder:
            return own.index_select(1, parts[-1])
        width = storage.block or v.shape[1] // own.shape[1]
        return own.repeat_interleave(width, 1)[:, : v.shape[1]]

    zero = spread(parts[2]) if storage.zero else None
    return value_of(v, spread(numbers(parts[1], storage, parts[2:])), zero, storage)


def pick(parts: Sequence[Tensor], storage: Storage, shape: Sequence[int], ids: Tensor) -> Tensor:
    """The rows `ids` as fp32, [ids, elements of a row]."""
    if storage.transposed:
        return _turned(pick(parts, storage.lying, _lying(shape), ids), shape)
    rows, length = rows_of(shape), row_elements(shape)
    if storage.flat:
        index = ids[:, None] * length + torch.arange(length, device=ids.device)
        if storage.codec == "torchao":
            return torchao.decode(parts, storage, index)
        codes = packing.pick(parts[0], index, storage.packing)
        blocks = slice(0, parts[1].numel())
        return (
            thresholds(storage, ids.device)[0][codes]
            * block_scales(parts, blocks)[index // storage.block]
        )
    codes = parts[0].view(rows, storage.bytes_of(length))
    bits = codes.view(torch.int16) if codes.dtype.itemsize == 2 else codes
    lines = bits[ids].view(codes.dtype)
    if storage.holds_values:
        return lines.to(torch.float32)
    return _scaled(lines, parts, storage, shape, ids)

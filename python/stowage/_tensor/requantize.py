# SPDX-License-Identifier: Apache-2.0
"""Quantizes again what a write changed of a weight, and nothing else.

One principle: a scale whose rows are all written is computed anew; a scale shared with a row that
is not written stays (rows may share a flat block of 4-bit codes), and the new values must fit it or
the write is refused. So no write alters a row that it did not name, and one that names the whole
weight leaves what quantizing its values gives. A row that is written and keeps its values counts as
written. Inside a written row, values that were not written are requantized from fp32, which gives
their codes back wherever the scale allows; where a new scale would not (int4 without zeros), a
group with such values keeps its own if all fit it. A write that changes no value changes none at
rest.
"""

from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import pad

from stowage._ops import library
from stowage._ops.errors import InvalidArgument, Unsupported, translated
from stowage._ops.memory import ensure_writable
from stowage._ops.numbers import four_bit, ordered, scaled, torchao
from stowage._ops.numbers.packing import pack, unpack
from stowage._ops.storage import NESTED_BLOCK, Storage
from stowage._tensor.stowed import VALUE_DTYPES, StowedTensor, rows_and_columns
from stowage._tensor.untouched import with_groups_of


class Rows(NamedTuple):
    """What a write names of a weight, as rows of dim 0."""

    rows: Tensor  # their indices, [n]
    written: Tensor  # which elements of them, bool [n, columns]
    changed: Tensor  # which of those have another value now
    values: Tensor  # all of them, fp32 [n, columns]
    rest: bool  # whether there are other rows


def refuse(weight: StowedTensor, rule: str) -> NoReturn:
    raise Unsupported(
        f"stowage: a write to some rows of {weight!r} needs {rule}, since it shares scales with "
        "rows that it does not change; write the whole weight at once (copy_)"
    )


def _blocks(flat: Tensor, block: int) -> Tensor:
    return pad(flat, (0, -len(flat) % block)).view(-1, block)


def encode_blocks(weight: StowedTensor, parts: Sequence[Tensor], lines: Rows) -> list[Tensor]:
    storage, (rows, columns) = weight._storage, rows_and_columns(weight.shape)
    block, count = storage.block, rows * columns
    start, near = int(lines.rows[0]), lines.rows - lines.rows[0]
    low, span = start * columns // block, int(near[-1]) + 1  # first block, rows from there

    def blocks_of(lines_of: Tensor) -> Tensor:
        """Values of the written rows in their places in blocks from `low` on, zeros elsewhere."""
        flat = lines_of.new_zeros(span, columns).index_copy_(0, near, lines_of).view(-1)
        return _blocks(pad(flat, (start * columns - low * block, 0)), block)

    mask, values = blocks_of(lines.written), blocks_of(lines.values)
    local = mask.any(1).nonzero().view(-1)
    mask, values, which = mask[local], values[local], local + low
    owned = _owned(which, lines, weight, block)[:, None]

    table = torch.tensor(storage.values, dtype=torch.float32, device=values.device)
    scales = _block_scales(parts, storage, which)[:, None]
    packed = _blocks(parts[0].view(-1), block // 2)
    nibbles = unpack(packed[which], storage.packing)
    wanted = torch.where(mask, values, table[nibbles.long()] * scales)
    inside = which[:, None] * block + torch.arange(block, device=which.device) < count
    wanted = torch.where(inside, wanted, 0.0)
    if storage.dialect == "torchao":
        wanted = torchao.as_type(wanted, storage).to(torch.float32)

    amax = wanted.abs().amax(1, keepdim=True)
    if storage.nested:
        find = _torchao_scales if storage.dialect == "torchao" else _nested_scales
        rest, fresh = find(weight, parts, which, amax, owned)
        scales = torch.where(owned, fresh, scales)
    else:
        scales = torch.where(owned, amax, scales)
        rest = [parts[1].index_copy(0, which, scales.view(-1))]
    if bool((amax > scales).any()):
        refuse(weight, "values within the largest of each block")
    tail = which[:, None] == count // block  # bitsandbytes divides in a short last block
    fresh = _nibbles(wanted, scales, tail, storage)
    nibbles = torch.where(mask | owned, fresh, nibbles)
    codes = packed.index_copy(0, which, pack(nibbles, storage.packing))
    return [codes.view(-1)[: parts[0].numel()].view_as(parts[0]), *rest]


def _block_scales(parts: Sequence[Tensor], storage: Storage, which: Tensor) -> Tensor:
    if storage.dialect == "torchao":
        return torchao.block_scales(parts, storage, which).to(torch.float32)
    return four_bit.block_scales(parts, slice(0, parts[1].numel()))[which]


def _nibbles(wanted: Tensor, scales: Tensor, tail: Tensor, storage: Storage) -> Tensor:
    if storage.dialect == "torchao":
        kind = torchao.work(storage)
        quotients = wanted.to(kind) / scales.to(kind)
        return torchao.encode(torchao.rounded(quotients, storage), storage)
    floor = scales.clamp(min=1e-38)
    scaled = torch.where(tail, wanted / floor, wanted * (torch.ones_like(floor) / floor))
    return four_bit.encode4(scaled.clamp(-1, 1), storage).view_as(wanted)


def _owned(which: Tensor, lines: Rows, weight: StowedTensor, block: int) -> Tensor:
    """Whether all rows that a block touches are written."""
    rows, columns = rows_and_columns(weight.shape)
    same = torch.ones(rows, dtype=torch.int64, device=which.device)
    same[lines.rows] = 0
    before = pad(same.cumsum(0), (1, 0))
    first = which * block // columns
    last = ((which + 1) * block).clamp(max=rows * columns) - 1
    return before[last // columns + 1] == before[first]


def _nested_scales(
    weight: StowedTensor, parts: Sequence[Tensor], which: Tensor, amax: Tensor, owned: Tensor
) -> tuple[list[Tensor], Tensor]:
    """New block scales, the smallest that hold `amax` among those that the nested scale offers."""
    _, absmax, nested, table, offset = parts
    span = nested[which // NESTED_BLOCK, None]

    def offered(code: Tensor) -> Tensor:
        return table[code] * span + offset

    code = torch.searchsorted(table, ((amax - offset) / span).nan_to_num(0.0)).clamp(max=255)
    code = torch.where(offered(code) < amax, code + 1, code).clamp(max=255)
    scales = offered(code)
    coarse = (scales > 2 * amax) & (amax > 0)  # its values would come out as zeros
    if bool((owned & (coarse | (scales < amax))).any()):
        refuse(weight, "block maxima like those of the rows beside them")
    code = torch.where(owned, code.to(torch.uint8), absmax[which, None])
    return [absmax.index_copy(0, which, code.view(-1)), nested, table, offset], scales


def _torchao_scales(
    weight: StowedTensor, parts: Sequence[Tensor], which: Tensor, amax: Tensor, owned: Tensor
) -> tuple[list[Tensor], Tensor]:
    """New block scales by torchao's rule, with a new factor where all blocks under it are new; the
    mean stays. Codes are made with the absmax itself, as there."""
    storage, kind = weight._storage, torchao.work(weight._storage)
    _, scalers, factors, mean, table = parts
    group = which // storage.scaler_block
    mine, maxima = group[owned[:, 0]], amax[owned].to(kind)
    deviation = torchao.rounded(maxima - mean.to(kind), storage)
    whole = torch.bincount(mine, minlength=len(factors)) == storage.scaler_block
    most = deviation.new_zeros(len(factors)).scatter_reduce_(0, mine, deviation.abs(), "amax")
    factor = torch.where(whole, torchao.factor_of(most, storage), factors.to(kind))
    scaled = torchao.rounded(deviation * factor[mine], storage).nan_to_num(0.0)
    q = scaled.round().clamp(-128, 127).to(torch.int8)
    scales = torchao.offered(q, factor[mine], mean, storage)
    coarse = (scales > 2 * maxima) & (maxima > 0)  # its values would come out as zeros
    if bool((~whole[mine] & (coarse | (scaled.abs() > 128))).any()):
        refuse(weight, "block maxima like those of the rows beside them")
    kept = [scalers.index_copy(0, which[owned[:, 0]], q), factor.to(factors.dtype), mean, table]
    return kept, amax


class Change(NamedTuple):
    """New parts for a weight, not yet in force."""

    weight: StowedTensor
    parts: Sequence[Tensor]

    def commit(self) -> None:
        pairs = zip(self.weight._parts(), self.parts, strict=True)
        changed = [(into, part) for into, part in pairs if part is not into]
        for into, _ in changed:
            ensure_writable(into)  # there may be no room, and then nothing has changed
        for into, part in changed:
            into.copy_(part)
        # Below autograd nothing else tells a backward that its weight has changed: graphs keep the
        # inner tensors, or the weight itself, or one that `.data` is an alias of.
        seen = [into for into, _ in changed] + [self.weight]
        for t in (*seen, self.weight._of):
            if t is not None and not t.is_inference():
                torch.autograd.graph.increment_version(t)
        if self.weight._origin is not None and not self.weight.is_meta:
            self.weight._origin.written()


def afresh(weight: StowedTensor, values: Tensor) -> Change:
    """What turns `weight` into one with these values everywhere."""
    if weight.is_meta:
        return Change(weight, weight._parts())
    if weight._storage.actorder:
        return Change(weight, quantized(values, weight._storage, weight._parts()))
    return Change(weight, first_parts(values, weight._storage))


def quantized(
    values: Tensor, storage: Storage, parts: Sequence[Tensor], keep_nonfinite: bool = False
) -> list[Tensor]:
    """New parts of a weight that has `parts`, all of whose values are written."""
    if storage.actorder:
        return ordered.quantize(values, storage, parts[-1])
    return library.quantize(values.contiguous(), storage.key, keep_nonfinite)


def first_parts(values: Tensor, storage: Storage) -> list[Tensor]:
    """Parts of a weight that is being initialised: of zeros as long as some value is not finite,
    since memory may hold anything until all of it is written."""
    try:
        return library.quantize(values.contiguous(), storage.key)
    except RuntimeError as error:
        if torch.stack(torch.aminmax(values)).isfinite().all():
            raise translated(error) from None
    layout = storage.layout(tuple(values.shape))
    return [torch.zeros(sizes, dtype=dtype, device=values.device) for _, dtype, sizes in layout]


def plan(
    weight: StowedTensor,
    first: int,
    new: Tensor,
    old: Tensor,
    named: Tensor | None,
    accumulates: bool,
) -> Change:
    """What turns `weight`, whose values from row `first` on are `old`, into one with `new` there.
    `named` says which elements were written, None that all were.

    Raises InvalidArgument for values that are not finite; Unsupported for values that do not fit a
    scale shared with other rows, and for an accumulating write that rounding would swallow.
    """
    parts = weight._parts()
    if weight.is_meta or not new.numel():
        return Change(weight, parts)
    rows, columns = rows_and_columns(weight.shape)
    count = len(new) if weight.dim() else 1
    changed = (new != old) & ~(new.isnan() & old.isnan())
    if not bool(new.float().isfinite().logical_or(~changed).all()):
        raise InvalidArgument(f"stowage: values written to {weight!r} must be finite")
    some = bool(changed.any())
    try:
        if named is None and count == rows:
            fresh = _encode_whole(weight, parts, new, some)
            if accumulates and some:
                _check_rounding(weight, _dense(weight, fresh), new.float(), old.float())
            return Change(weight, fresh)
        if not some:
            return Change(weight, parts)
        flat = (count, columns)
        every = torch.ones_like(changed) if named is None else named
        lines = _lines(
            weight, parts, first, new.reshape(flat), every.view(flat), changed.view(flat)
        )
        fresh = _encode(weight, parts, lines)
        if accumulates:
            after = _values(weight, fresh, lines.rows)
            before = old.reshape(flat)[lines.rows - first].float()
            seen = [torch.where(lines.changed, t, after) for t in (lines.values, before)]
            _check_rounding(weight, after, *seen)
    except RuntimeError as error:
        raise translated(error) from None
    return Change(weight, fresh)


def _encode_whole(
    weight: StowedTensor, parts: Sequence[Tensor], new: Tensor, changed: bool
) -> Sequence[Tensor]:
    """What quantizing the values gives; but where no value changes, only if that gives them back:
    quantizing twice may round twice."""
    wide = new if new.dtype in VALUE_DTYPES else new.float()
    kept = not bool(wide.isfinite().all())  # it held them before, or plan() had refused
    fresh = quantized(wide, weight._storage, parts, kept)
    if changed:
        return fresh
    before, after = (_dense(weight, each).view(torch.int32) for each in (parts, fresh))
    return fresh if torch.equal(before, after) else parts


def _dense(weight: StowedTensor, parts: Sequence[Tensor]) -> Tensor:
    codes, *scales = parts
    return library.dequantize(codes, scales, weight._storage.key, weight.shape, torch.float32)


def _lines(
    weight: StowedTensor,
    parts: Sequence[Tensor],
    first: int,
    new: Tensor,
    named: Tensor,
    changed: Tensor,
) -> Rows:
    touched = named.any(1).nonzero().view(-1)
    written, changed, index = named[touched], changed[touched], touched + first
    values = torch.where(changed, new[touched].float(), _values(weight, parts, index))
    return Rows(index, written, changed, values, len(index) < rows_and_columns(weight.shape)[0])


def _values(weight: StowedTensor, parts: Sequence[Tensor], index: Tensor) -> Tensor:
    """Rows of the weight in fp32, [n, columns]. A scalar has none: a write to it is whole."""
    codes, *scales = parts
    kind, shape = weight._storage.key, weight.shape
    rows = library.embedding(index, codes, scales, kind, shape, torch.float32)
    return rows.view(len(index), rows_and_columns(shape)[1])


def _encode(weight: StowedTensor, parts: Sequence[Tensor], lines: Rows) -> list[Tensor]:
    storage = weight._storage
    if storage.kind == "none":
        return _encode_casts(weight, parts, lines)
    if not lines.rest:
        whole = lines.values.view(weight.shape)
        if storage.under_rows:
            return _quantize_under(whole, lines.written, parts[2], storage)
        fresh = _quantize_rows(whole, lines.written, parts, parts[1], storage)
        return with_groups_of(parts, fresh, lines.written, storage)
    if storage.flat:
        return encode_blocks(weight, parts, lines)
    codes, *scales = (part.clone() for part in parts)
    if (each := storage.rows_together(weight.shape)) > 1:
        blocks, every = _rows_of_blocks(each, lines.rows, scales[0], storage, weight.shape[0])
        values = _values(weight, parts, every)
        which = torch.searchsorted(every, lines.rows)
        values[which] = lines.values
        written = torch.zeros_like(values, dtype=torch.bool).index_copy_(0, which, lines.written)
        before = [codes[every], *(scale[blocks] for scale in scales)]
        fresh = _quantize_rows(values, written, parts, before[1], storage)
        codes[every], *fresh = with_groups_of(before, fresh, written, storage)
        for scale, part in zip(scales, fresh, strict=True):
            scale[blocks] = part
        return [codes, *scales]
    if storage.kind == "tensor":
        _check_reach(weight, lines.values, parts)
        number = scaled.numbers(parts[1], storage)
        zero = scaled.moved_by(parts[2], number, storage) if storage.zero else None
        fresh = [scaled.encode(lines.values, number, storage, zero)]
    else:
        values = lines.values.view(-1, *weight.shape[1:])
        if storage.under_one_of_all:
            _check_reach(weight, values, parts)
            fresh = scaled.quantize_groups(values, storage, parts[2])
        elif storage.under_rows:
            fresh = _quantize_under(values, lines.written, parts[2][lines.rows], storage)
        else:
            kept = parts[1][lines.rows]
            fresh = _quantize_rows(values, lines.written, parts, kept, storage)
            before = [part[lines.rows] for part in parts[: storage.in_rows]]
            fresh = with_groups_of(before, fresh, lines.written, storage)
        for scale, part in zip(scales[: storage.in_rows - 1], fresh[1:], strict=False):
            scale[lines.rows] = part
    codes[lines.rows] = fresh[0].view(-1, *codes.shape[1:])
    return [codes, *scales]


def _quantize_rows(
    values: Tensor, written: Tensor, parts: Sequence[Tensor], kept: Tensor, storage: Storage
) -> list[Tensor]:
    """The parts of some rows of a weight of `parts`, whose scales were `kept`. Where the largest
    code is not what a scale is made for, quantizing what was read moves the scale and every value,
    and one write after the other would add that up: there groups that were written in part keep a
    scale that all fit, and an absmax whose last bits alone would be others."""
    if storage.actorder:
        return ordered.quantize(values, storage, parts[-1], ordered.Partly(written, kept))
    fresh = library.quantize(values, storage.key)
    rounds_twice = storage.scale_code == "absmax"
    steady = storage.zero or (storage.divisor == storage.largest and not rounds_twice)
    if steady or storage.record or written.all():
        return fresh
    shape = values.shape if storage.rows else written.shape
    v = _grouped(values.reshape(shape), storage, kept)
    partly = _grouped(~written.reshape(shape), storage, kept).any(3).any(1)
    old, new = (scaled.numbers(s, storage).reshape(partly.shape) for s in (kept, fresh[1]))
    if rounds_twice:
        keeps = partly & ((new - old).abs() <= 2.0**-21 * old)
    else:
        lo, hi = storage.least * old * scaled.SLACK, storage.divisor * old * scaled.SLACK
        keeps = partly & (v.amin((1, 3)) >= lo) & (v.amax((1, 3)) <= hi)
    used = torch.where(keeps, old, new)[:, None, :, None]
    codes = scaled.encode(v, used, storage)
    if storage.rows and len(shape) == 3:
        of_each = codes.reshape(len(values), -1, codes.shape[2] * codes.shape[3])
        cut = of_each[:, : shape[1], : storage.bytes_of(shape[2])].reshape(fresh[0].shape)
    else:
        codes = codes.reshape(v.shape[0] * v.shape[1], -1)
        rows = fresh[0].reshape(kept.numel() if storage.kind == "row2" else len(written), -1)
        cut = codes[: len(rows), : rows.shape[1]].reshape(fresh[0].shape)
    return [cut, torch.where(keeps.reshape(kept.shape), kept, fresh[1])]


def _quantize_under(
    values: Tensor, written: Tensor, kept: Tensor, storage: Storage
) -> list[Tensor]:
    """The parts of some rows, whose scales stood under numbers `kept`: what has values that were
    not written stays under its own where all fit it, since another moves every one of them."""
    fresh = library.quantize(values, storage.key)
    if written.all() or not values.numel():
        return fresh
    partly = (~written).reshape(kept.numel(), -1).any(1).view(kept.shape)
    most = values.abs().reshape(kept.numel(), -1).amax(1).view(kept.shape)
    reach = scaled.largest_shared([values, values, kept], storage) * storage.divisor
    outer = torch.where(partly & (most <= reach * scaled.SLACK), kept, fresh[2])
    return scaled.quantize_groups(values, storage, outer)


def _grouped(lines: Tensor, storage: Storage, scales: Tensor) -> Tensor:
    """[groups of rows, rows of each, groups along them, columns of each], padded with zeros: each
    matrix of a stack by itself."""
    if storage.kind == "row2":
        lines = lines.reshape(scales.numel(), -1)
    rows, columns = lines.shape[-2:]
    each = rows if storage.kind == "tensor" else storage.rows or 1
    width = storage.block or columns
    padded = pad(lines, (0, -columns % width, 0, -rows % each))
    return padded.view(-1, each, padded.shape[-1] // width, width)


def _check_reach(weight: StowedTensor, values: Tensor, parts: Sequence[Tensor]) -> None:
    """Values of some rows must fit what all rows share, which stays."""
    storage = weight._storage
    scale = float(scaled.largest_shared(parts, storage)) * scaled.SLACK
    least, most = storage.least, storage.divisor  # those that a scale is made for
    if storage.zero:
        zero = float(scaled.moved_by(parts[2], scaled.numbers(parts[1], storage), storage))
        least, most = storage.least - zero, storage.largest - zero
    lo, hi = least * scale, most * scale
    if float(values.amin()) < lo or float(values.amax()) > hi:
        span = f"within +-{hi:.6g}" if lo == -hi else f"from {lo:.6g} to {hi:.6g}"
        refuse(weight, f"values {span}")


def _rows_of_blocks(
    each: int, rows: Tensor, scales: Tensor, storage: Storage, count: int
) -> tuple[Tensor, Tensor]:
    """Which rows of scales these rows have, and all rows that have them: of blocks of `each`, or of
    groups of columns."""
    if storage.by_columns:
        apart = len(scales)
        mine = torch.unique(rows % apart)
        return mine, (torch.arange(0, count, apart, device=rows.device)[:, None] + mine).view(-1)
    blocks = torch.unique(rows // each)
    every = (blocks[:, None] * each + torch.arange(each, device=rows.device)).view(-1)
    return blocks, every[every < count]


def _encode_casts(weight: StowedTensor, parts: Sequence[Tensor], lines: Rows) -> list[Tensor]:
    codes = parts[0].clone()
    flat = codes.view(rows_and_columns(weight.shape))
    values = torch.where(lines.changed, lines.values, 0.0)
    (fresh,) = library.quantize(values, weight._storage.key)
    flat[lines.rows] = torch.where(lines.changed, fresh, flat[lines.rows])
    return [codes]


# --- rounding -------------------------------------------------------------------------------------


def _check_rounding(weight: StowedTensor, after: Tensor, wanted: Tensor, before: Tensor) -> None:
    lost, asked = (after - wanted).double(), (wanted - before).double()
    if bool(lost.square().sum() >= asked.square().sum()):
        raise Unsupported(
            f"stowage: an accumulating write changes {weight!r} by less than its rounding step and "
            "would be lost; accumulate in a plain tensor and copy_ the result, or unstow the model"
        )

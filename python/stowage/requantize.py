# SPDX-License-Identifier: Apache-2.0
"""Quantizes again what a write changed of a weight, and nothing else.

One principle: a scale whose rows have all changed is computed anew; a scale shared with a row that
did not change stays, and the new values must fit it or the write is refused. So no write alters a
row that it did not name. Inside a changed row, values that were not written are requantized from
fp32, which gives their codes back wherever the scale allows.
"""

from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import pad

from stowage import ops
from stowage._errors import InvalidArgument, Unsupported, translated
from stowage._mapped import ensure_writable
from stowage._numbers import codec, codec4, torchao
from stowage._storage import NESTED_BLOCK, Storage
from stowage.tensor import StowedTensor, rows_and_columns

_SLACK = 1 + 2.0**-20  # quantizing with a rounded scale may exceed the largest code by this


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
            if not into.is_inference():
                # Below autograd nothing else tells a backward that its weight has changed.
                torch.autograd.graph.increment_version(into)
        if self.weight._origin is not None and not self.weight.is_meta:
            self.weight._origin.written()


def afresh(weight: StowedTensor, values: Tensor) -> Change:
    """What turns `weight` into one with these values everywhere."""
    parts = weight._parts() if weight.is_meta else first_parts(values, weight._storage)
    return Change(weight, parts)


def first_parts(values: Tensor, storage: Storage) -> list[Tensor]:
    """Parts of a weight that is being initialised: of zeros as long as some value is not finite,
    since memory may hold anything until all of it is written."""
    try:
        return ops.quantize(values.contiguous(), storage.key)
    except RuntimeError as error:
        if torch.stack(torch.aminmax(values)).isfinite().all():
            raise translated(error) from None
    layout = storage.layout(tuple(values.shape))
    return [torch.zeros(sizes, dtype=dtype, device=values.device) for _, dtype, sizes in layout]


class _Rows(NamedTuple):
    """What a write changed, as rows of dim 0."""

    rows: Tensor  # their indices, [n]
    written: Tensor  # which elements of them, bool [n, columns]
    values: Tensor  # all of them, fp32 [n, columns]
    rest: bool  # whether other rows did not change


def plan(weight: StowedTensor, first: int, new: Tensor, old: Tensor, accumulates: bool) -> Change:
    """What turns `weight`, whose values from row `first` on are `old`, into one with `new` there.

    Raises InvalidArgument for values that are not finite; Unsupported for values that do not fit a
    scale shared with other rows, and for an accumulating write that rounding would swallow.
    """
    parts = weight._parts()
    if weight.is_meta:
        return Change(weight, parts)
    rows, columns = rows_and_columns(weight.shape)
    count = len(new) if weight.dim() else 1
    new, old = new.reshape(count, columns), old.reshape(count, columns)
    changed = (new != old) & ~(new.isnan() & old.isnan())
    touched = changed.any(1).nonzero().view(-1)
    if not len(touched):
        return Change(weight, parts)
    written, index = changed[touched], touched + first
    values = torch.where(written, new[touched].float(), _values(weight, parts, index))
    if not bool(values.isfinite().logical_or(~written).all()):
        raise InvalidArgument(f"stowage: values written to {weight!r} must be finite")
    lines = _Rows(index, written, values, len(index) < rows)
    try:
        fresh = _encode(weight, parts, lines)
        if accumulates:
            _check_rounding(weight, fresh, lines, old[touched].float())
    except RuntimeError as error:
        raise translated(error) from None
    return Change(weight, fresh)


def _values(weight: StowedTensor, parts: Sequence[Tensor], index: Tensor) -> Tensor:
    """Rows of the weight in fp32, [n, columns]."""
    codes, *scales = parts
    kind, shape = weight._storage.key, weight.shape
    if not weight.dim():
        return ops.dequantize(codes, scales, kind, shape, torch.float32).view(1, 1)
    rows = ops.embedding(index, codes, scales, kind, shape, torch.float32)
    return rows.view(len(index), rows_and_columns(shape)[1])


def _encode(weight: StowedTensor, parts: Sequence[Tensor], lines: _Rows) -> list[Tensor]:
    storage = weight._storage
    if storage.kind == "none":
        return _encode_casts(weight, parts, lines)
    if not lines.rest:
        return ops.quantize(lines.values.view(weight.shape), storage.key)
    if storage.bits == 4:
        return _encode_blocks(weight, parts, lines)
    codes, scale = (part.clone() for part in parts)
    if storage.kind == "tensor":
        reach = float(scale) * storage.largest * _SLACK
        if float(lines.values.abs().amax()) > reach:
            _refuse(weight, f"values within +-{reach:.6g}")
        fresh = [codec.encode8(lines.values, scale, storage)]
    else:
        fresh = ops.quantize(lines.values.view(-1, *weight.shape[1:]), storage.key)
        scale[lines.rows] = fresh[1]
    codes[lines.rows] = fresh[0].view(-1, *weight.shape[1:])
    return [codes, scale]


def _encode_casts(weight: StowedTensor, parts: Sequence[Tensor], lines: _Rows) -> list[Tensor]:
    codes = parts[0].clone()
    flat = codes.view(rows_and_columns(weight.shape))
    values = torch.where(lines.written, lines.values, 0.0)
    (fresh,) = ops.quantize(values, weight._storage.key)
    flat[lines.rows] = torch.where(lines.written, fresh, flat[lines.rows])
    return [codes]


def _refuse(weight: StowedTensor, rule: str) -> NoReturn:
    raise Unsupported(
        f"stowage: a write to some rows of {weight!r} needs {rule}, since it shares scales with "
        "rows that it does not change; write the whole weight at once (copy_)"
    )


# --- 4-bit codes: flat blocks, which rows may share -----------------------------------------------


def _blocks(flat: Tensor, block: int) -> Tensor:
    return pad(flat, (0, -len(flat) % block)).view(-1, block)


def _encode_blocks(weight: StowedTensor, parts: Sequence[Tensor], lines: _Rows) -> list[Tensor]:
    storage, (rows, columns) = weight._storage, rows_and_columns(weight.shape)
    block, count = storage.block, rows * columns
    start, near = int(lines.rows[0]), lines.rows - lines.rows[0]
    low, span = start * columns // block, int(near[-1]) + 1  # first block, rows from there

    def blocks_of(lines_of: Tensor) -> Tensor:
        """Values of the changed rows in their places in blocks from `low` on, zeros elsewhere."""
        flat = lines_of.new_zeros(span, columns).index_copy_(0, near, lines_of).view(-1)
        return _blocks(pad(flat, (start * columns - low * block, 0)), block)

    mask, values = blocks_of(lines.written), blocks_of(lines.values)
    local = mask.any(1).nonzero().view(-1)
    mask, values, which = mask[local], values[local], local + low
    owned = _owned(which, lines, weight, block)[:, None]

    table = torch.tensor(storage.values, dtype=torch.float32, device=values.device)
    scales = _block_scales(parts, storage, which)[:, None]
    packed = _blocks(parts[0].view(-1), block // 2)
    nibbles = torch.stack([packed[which] >> 4, packed[which] & 15], 2).view(-1, block)
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
        _refuse(weight, "values within the largest of each block")
    tail = which[:, None] == count // block  # bitsandbytes divides in a short last block
    fresh = _nibbles(wanted, scales, tail, storage)
    nibbles = torch.where(mask | owned, fresh, nibbles)
    codes = packed.index_copy(0, which, nibbles[:, 0::2] * 16 + nibbles[:, 1::2])
    return [codes.view(-1)[: parts[0].numel()].view_as(parts[0]), *rest]


def _block_scales(parts: Sequence[Tensor], storage: Storage, which: Tensor) -> Tensor:
    if storage.dialect == "torchao":
        return torchao.block_scales(parts, storage, which).to(torch.float32)
    return codec4.block_scales(parts, slice(0, parts[1].numel()))[which]


def _nibbles(wanted: Tensor, scales: Tensor, tail: Tensor, storage: Storage) -> Tensor:
    if storage.dialect == "torchao":
        kind = torchao.work(storage)
        quotients = wanted.to(kind) / scales.to(kind)
        return torchao.encode(torchao.rounded(quotients, storage), storage)
    floor = scales.clamp(min=1e-38)
    scaled = torch.where(tail, wanted / floor, wanted * (torch.ones_like(floor) / floor))
    return codec4.encode4(scaled.clamp(-1, 1), storage).view_as(wanted)


def _owned(which: Tensor, lines: _Rows, weight: StowedTensor, block: int) -> Tensor:
    """Whether all rows that a block touches have changed."""
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
        _refuse(weight, "block maxima like those of the rows beside them")
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
        _refuse(weight, "block maxima like those of the rows beside them")
    kept = [scalers.index_copy(0, which[owned[:, 0]], q), factor.to(factors.dtype), mean, table]
    return kept, amax


# --- rounding -------------------------------------------------------------------------------------


def _check_rounding(
    weight: StowedTensor, fresh: Sequence[Tensor], lines: _Rows, before: Tensor
) -> None:
    after = _values(weight, fresh, lines.rows)
    lost = torch.where(lines.written, after - lines.values, 0.0).double().square().sum()
    asked = torch.where(lines.written, lines.values - before, 0.0).double().square().sum()
    if bool(lost >= asked):
        raise Unsupported(
            f"stowage: an accumulating write changes {weight!r} by less than its rounding step and "
            "would be lost; accumulate in a plain tensor and copy_ the result, or unstow the model"
        )

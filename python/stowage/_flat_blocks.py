# SPDX-License-Identifier: Apache-2.0
"""Flat blocks of 4-bit codes, which rows may share: quantized again where rows were written."""

from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import pad

from stowage._ops.errors import Unsupported
from stowage._ops.numbers import four_bit, torchao
from stowage._ops.storage import NESTED_BLOCK, Storage
from stowage.tensor import StowedTensor, rows_and_columns


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
        refuse(weight, "values within the largest of each block")
    tail = which[:, None] == count // block  # bitsandbytes divides in a short last block
    fresh = _nibbles(wanted, scales, tail, storage)
    nibbles = torch.where(mask | owned, fresh, nibbles)
    codes = packed.index_copy(0, which, nibbles[:, 0::2] * 16 + nibbles[:, 1::2])
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

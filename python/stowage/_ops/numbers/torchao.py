# SPDX-License-Identifier: Apache-2.0
"""nf4:torchao by stock torch ops: torchao's rule, bit for bit, but for the mean (docs/numbers.md).

Every step is computed in fp32 (fp64 for f64) and rounded to D, the dtype of the parts.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from stowage._ops.numbers.packing import pack, pick
from stowage._ops.numbers.rounding import check_finite, round_to_odd, spans
from stowage._ops.storage import Storage

_LEAST, _MOST = -128, 127  # quantized block scales


def work(storage: Storage) -> torch.dtype:
    """What D computes in."""
    return torch.float64 if storage.type_dtype == torch.float64 else torch.float32


def rounded(x: Tensor, storage: Storage) -> Tensor:
    """To nearest in D, in the dtype that D computes in."""
    return x.to(storage.type_dtype).to(x.dtype)


def as_type(x: Tensor, storage: Storage) -> Tensor:
    """Numbers in D: as they are, else as the plain cast to D makes them, which saturates."""
    dtype = storage.type_dtype
    if x.dtype == dtype or dtype == torch.float64:
        return x.to(work(storage))
    narrow = x.dtype == torch.float64 and dtype != torch.float32
    wide = round_to_odd(x) if narrow else x.to(torch.promote_types(x.dtype, torch.float32))
    largest = torch.finfo(dtype).max
    return wide.clamp(-largest, largest).to(dtype).to(torch.float32)


@cache
def thresholds(storage: Storage, device: torch.device) -> Tensor:
    """15 numbers of D: code k is left at the last for which the rule still gives it.

    The rule is the first code with the least r(|s - value|). Rounded distances to neighbouring
    values are monotone in s, so that one threshold between two values settles which is nearer.
    """
    table = torch.tensor(storage.values, dtype=work(storage))
    low, high = table[:-1].double(), table[1:].double()
    while True:
        middle = rounded(((low + high) / 2).to(table.dtype), storage)
        inside = (middle.double() != low) & (middle.double() != high)
        if not bool(inside.any()):
            return low.to(table.dtype).to(device)
        to_low, to_high = (rounded((middle - t).abs(), storage) for t in (table[:-1], table[1:]))
        upper = to_high < to_low
        low = torch.where(inside & ~upper, middle.double(), low)
        high = torch.where(inside & upper, middle.double(), high)


def encode(quotients: Tensor, storage: Storage) -> Tensor:
    """Codes of numbers divided by the scale of their block; NaN takes the first."""
    codes = torch.bucketize(quotients, thresholds(storage, quotients.device), out_int32=True)
    return torch.where(torch.isnan(quotients), 0, codes).to(torch.uint8)


def quantize(x: Tensor, storage: Storage) -> list[Tensor]:
    """The parts of a weight; `x` has whole scaler blocks."""
    block, flat = storage.block, x.reshape(-1)
    codes = torch.empty((flat.numel() // 2, 1), dtype=torch.uint8, device=x.device)
    absmax = torch.empty(flat.numel() // block, dtype=work(storage), device=x.device)
    for span in spans(absmax.numel(), block):
        given = flat[span.start * block : span.stop * block]
        wide = given if given.dtype == torch.float64 else given.to(torch.float32)
        check_finite(wide, span.start * block)
        v = as_type(given, storage).view(-1, block)
        largest = v.abs().amax(1)
        absmax[span].copy_(largest)
        coded = encode(rounded(v / largest[:, None], storage), storage).view(-1)
        packed = pack(coded, storage.packing)
        codes.view(-1)[span.start * block // 2 : span.stop * block // 2].copy_(packed)
    return [codes, *nest(absmax, storage)]


def nest(absmax: Tensor, storage: Storage) -> list[Tensor]:
    """The parts but the codes, from the scales of all blocks."""
    dtype, count = storage.type_dtype, absmax.numel()
    total = absmax.cpu().to(torch.float64).cumsum(0)[-1:]  # in index order
    mean64 = (total / torch.full_like(total, max(count, 1))) if count else total.new_zeros(1)
    narrow = round_to_odd(mean64) if dtype.itemsize == 2 else mean64
    mean = narrow.to(dtype).view(()).to(absmax.device)
    deviation = rounded(absmax - mean.to(absmax.dtype), storage).view(-1, storage.scaler_block)
    most = deviation.abs().amax(1) if count else deviation.new_empty(0)
    factor = factor_of(most, storage)
    scaled = rounded(deviation * factor[:, None], storage).round()
    # 0 times an infinite factor, where all scales are the mean: its cast to int8 gives 0.
    scalers = scaled.nan_to_num(0.0, _MOST, _LEAST).clamp(_LEAST, _MOST).to(torch.int8).view(-1)
    table = torch.tensor(storage.values, dtype=torch.float64).to(dtype).to(absmax.device)
    return [scalers, factor.to(dtype), mean, table]


def factor_of(most: Tensor, storage: Storage) -> Tensor:
    """What scales whose deviation from the mean is at most this are multiplied with."""
    span = rounded(most * 2, storage)
    return rounded(torch.full_like(span, 256) / span, storage)


def offered(scalers: Tensor, factor: Tensor, mean: Tensor, storage: Storage) -> Tensor:
    """The block scales that int8 numbers stand for: r(r(q / factor) + mean)."""
    kind = work(storage)
    quotient = rounded(scalers.to(kind) / factor.to(kind), storage)
    return rounded(quotient + mean.to(kind), storage)


def block_scales(parts: Sequence[Tensor], storage: Storage, blocks: Tensor) -> Tensor:
    """Scales of the blocks of these indices."""
    _, scalers, factor, mean, _ = parts
    return offered(scalers[blocks], factor[blocks // storage.scaler_block], mean, storage)


def decode(parts: Sequence[Tensor], storage: Storage, index: Tensor) -> Tensor:
    """Elements of the flat weight, exact, as fp32 (fp64 for f64)."""
    codes = pick(parts[0], index, storage.packing)
    table = parts[4].to(work(storage))
    return rounded(table[codes] * block_scales(parts, storage, index // storage.block), storage)

# SPDX-License-Identifier: Apache-2.0
"""Quantizing to groups that a weight's columns have by name, by stock torch ops: the order of a
weight that is written to stays, since only a tool that calibrates finds one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stowage._ops.numbers import scaled
from stowage._ops.numbers.rounding import check_finite, spans
from stowage._ops.storage import Storage


class Partly(NamedTuple):
    """Of a matrix that is written in part: which elements, and the scales that it had."""

    written: Tensor  # bool [rows, columns]
    kept: Tensor  # as the storage keeps them


def quantize(
    x: Tensor, storage: Storage, groups: Tensor, partly: Partly | None = None
) -> list[Tensor]:
    """The parts of a matrix whose column k is of group `groups[k]`. Where it is written in part
    and the largest code is not what a scale is made for, a group with values that were not written
    keeps its scale if all its values fit."""
    steady = storage.zero or storage.divisor == storage.largest
    codes, *rest = (
        torch.empty(sizes, dtype=dtype, device=x.device)
        for _, dtype, sizes in storage.layout(x.shape)
    )
    which, count = groups.long(), rest[0].shape[1]
    for span in spans(*x.shape):
        v = x[span].to(torch.float32)
        check_finite(v.reshape(-1), span.start * x.shape[1])
        lo, hi = (_of_each(v, which, count, how) for how in ("amin", "amax"))
        made, used, zero = scaled.scales_and_zeros(lo, hi, storage)
        if partly is not None and not steady:
            stays = _of_each((~partly.written[span]).float(), which, count, "amax") > 0
            old = scaled.numbers(partly.kept[span], storage)
            least, most = storage.least * scaled.SLACK, storage.divisor * scaled.SLACK
            stays &= (lo >= least * old) & (hi <= most * old)
            made[0], used = torch.where(stays, partly.kept[span], made[0]), old.where(stays, used)
        for into, part in zip(rest, made, strict=False):
            into[span] = part
        from_zero = None if zero is None else zero[:, which]
        codes[span] = scaled.encode(v, used[:, which], storage, from_zero)
    rest[-1].copy_(groups)
    return [codes, *rest]


def _of_each(v: Tensor, which: Tensor, count: int, how: str) -> Tensor:
    """The least or the largest of 0 and the values of each group: [rows, count]."""
    return v.new_zeros(len(v), count).scatter_reduce(1, which.expand_as(v), v, how)

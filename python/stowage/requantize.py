# SPDX-License-Identifier: Apache-2.0
"""Quantizes again what a write changed of a weight, and nothing else.

One principle: a scale whose rows are all written is computed anew; a scale shared with a row that
is not written stays, and the new values must fit it or the write is refused. So no write alters a
row that it did not name, and one that names the whole weight leaves what quantizing its values
gives. A row that is written and keeps its values counts as written. Inside a written row, values
that were not written are requantized from fp32, which gives their codes back wherever the scale
allows. A write that changes no value changes no value at rest either.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stowage._flat_blocks import Rows, encode_blocks, refuse
from stowage._ops import library
from stowage._ops.errors import InvalidArgument, Unsupported, translated
from stowage._ops.memory import ensure_writable
from stowage._ops.numbers import scaled
from stowage._ops.storage import Storage
from stowage.tensor import VALUE_DTYPES, StowedTensor, rows_and_columns

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
    parts = weight._parts() if weight.is_meta else first_parts(values, weight._storage)
    return Change(weight, parts)


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
    fresh = library.quantize(wide.contiguous(), weight._storage.key, kept)
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
        return library.quantize(lines.values.view(weight.shape), storage.key)
    if storage.bits == 4:
        return encode_blocks(weight, parts, lines)
    codes, scale = (part.clone() for part in parts)
    if storage.kind == "tensor":
        reach = float(scale) * storage.largest * _SLACK
        if float(lines.values.abs().amax()) > reach:
            refuse(weight, f"values within +-{reach:.6g}")
        fresh = [scaled.encode8(lines.values, scale, storage)]
    else:
        fresh = library.quantize(lines.values.view(-1, *weight.shape[1:]), storage.key)
        scale[lines.rows] = fresh[1]
    codes[lines.rows] = fresh[0].view(-1, *weight.shape[1:])
    return [codes, scale]


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

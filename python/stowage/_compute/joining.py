# SPDX-License-Identifier: Apache-2.0
"""cat and stack of stowed tensors along dim 0: where scales allow, codes and scales are joined.

No value is read and none is rounded again, so the result has exactly the values of its pieces. They
must agree in storage, compute dtype and exactness. `stack` turns a scale into one for each piece:
tensor into row, row into row2, as taking an index turns them back (_slices.row).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stowage._ops.storage import NESTED_BLOCK, Storage
from stowage.registry import op
from stowage.tensor import StowedTensor, wrap
from stowage.views import is_first

aten = torch.ops.aten


@op(aten.cat.default)
def _cat(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    pieces, dim = (*args, kwargs.get("dim", 0))[:2]
    if (
        not _alike(pieces)
        or not is_first(dim, pieces[0].dim())
        or len({p.shape[1:] for p in pieces}) > 1
    ):
        return NotImplemented
    storage = pieces[0]._storage
    parts = _flat(pieces) if storage.bits == 4 else _rows(pieces)
    rows = sum(piece.shape[0] for piece in pieces)
    return _joined(pieces, parts, storage, (rows, *pieces[0].shape[1:]))


@op(aten.stack.default)
def _stack(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    pieces, dim = (*args, kwargs.get("dim", 0))[:2]
    if (
        not _alike(pieces)
        or not is_first(dim, pieces[0].dim() + 1)
        or len({p.shape for p in pieces}) > 1
    ):
        return NotImplemented
    storage, shape = pieces[0]._storage, (len(pieces), *pieces[0].shape)
    if storage.misfit(shape):  # nf4:torchao has no third dimension
        return NotImplemented
    if storage.bits == 4:
        return _joined(pieces, _flat(pieces), storage, shape)
    codes, *scales = (torch.stack(parts) for parts in _by_part(pieces))
    if storage.kind == "tensor":
        storage = Storage(f"{storage.codes}:row")
    elif storage.kind == "row":
        storage = Storage(f"{storage.codes}:row2")
    elif storage.kind == "row2" or (storage.kind == "block" and shape[-1] % storage.block):
        return NotImplemented
    named = storage.layout(shape)[1:]
    parts = [codes, *(s.reshape(sizes) for s, (_, _, sizes) in zip(scales, named, strict=True))]
    return _joined(pieces, parts, storage, shape)


def _alike(pieces: Sequence[Any]) -> bool:
    """Whether all rest in the same way, and have rows."""
    if not pieces or any(type(p) is not StowedTensor or not p.dim() for p in pieces):
        return False
    facts = {(p._storage.key, p._dt, p._exact, p.device) for p in pieces}
    return len(facts) == 1


def _by_part(pieces: Sequence[StowedTensor]) -> list[list[Tensor]]:
    """For each part of the storage, that of every piece."""
    return [list(parts) for parts in zip(*(p._parts() for p in pieces), strict=True)]


def _same(parts: Sequence[Tensor]) -> bool:
    """Whether pieces share one scale: they are slices of one weight, or it has equal values."""
    first = parts[0]
    if all(part is first for part in parts):
        return True
    return type(first) is Tensor and not first.is_meta and all(first.equal(p) for p in parts[1:])


def _rows(pieces: Sequence[StowedTensor]) -> list[Tensor] | None:
    """Joined parts of 8-bit codes and casts; None where pieces have different scales for all."""
    codes, *scales = _by_part(pieces)
    if pieces[0]._storage.kind == "tensor":
        return [torch.cat(codes), scales[0][0].clone()] if _same(scales[0]) else None
    return [torch.cat(codes), *(torch.cat(scale) for scale in scales)]


def _flat(pieces: Sequence[StowedTensor]) -> list[Tensor] | None:
    """Joined parts of 4-bit codes; None where a piece but the last ends inside of a block."""
    storage = pieces[0]._storage
    edge = storage.block * (storage.scaler_block or (NESTED_BLOCK if storage.nested else 1))
    if any(piece.numel() % edge for piece in pieces[:-1]):
        return None
    codes, absmax, *rest = _by_part(pieces)
    parts = [torch.cat(codes), torch.cat(absmax)]
    if not storage.nested:
        return parts
    group, *shared = rest
    if not all(map(_same, shared)):  # each weight has its own offset
        return None
    return [*parts, torch.cat(group), *(part[0].clone() for part in shared)]


def _joined(
    pieces: Sequence[StowedTensor],
    parts: Sequence[Tensor] | None,
    storage: Storage,
    shape: Sequence[int],
) -> Any:
    if parts is None:
        return NotImplemented
    return wrap(parts, storage, shape, pieces[0]._dt, pieces[0]._exact)

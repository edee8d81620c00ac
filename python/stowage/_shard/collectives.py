# SPDX-License-Identifier: Apache-2.0
"""Collectives of DTensor on rows of resting weights, and how what comes is put together again.

Where two dimensions of a mesh have cut a weight, rows come out of order and columns in pieces:
records then travel with the numbers of their rows.
"""

from __future__ import annotations

from typing import Any

import torch

from stowage._ops.errors import Unsupported
from stowage._ops.memory import octets
from stowage._shard.pieces import is_tagged, join_columns, tagged
from stowage._shard.row_operators import PREPARE, together
from stowage._shard.rows import StowedRows
from stowage._tensor.tables import row_op

aten = torch.ops.aten
c10d = torch.ops.c10d
functional = torch.ops._c10d_functional


@row_op(functional.all_gather_into_tensor.default)
def _all_gather(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows, whole = args[0], args[0]._whole
    if whole.span or whole.total or is_tagged(rows._records, whole.geometry.length):
        sent = rows._records
        sent = sent if is_tagged(sent, whole.geometry.length) else tagged(sent, rows.first)
        return rows._like(called(sent, *args[1:], **kwargs), None)
    records = called(rows._records, *args[1:], **kwargs)
    start: int | None = 0 if records.shape[0] >= rows._whole.shape[0] else None
    return rows._like(records, start)


@row_op(functional.wait_tensor.default)
def _wait(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    records = called(args[0]._records)
    return together(args[0]._like(records, args[0].first))


@row_op(aten.index_select.default)
def _index_select(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """How DTensor puts rows in order that two dimensions of a mesh have mixed."""
    rows, dim, index = args
    if dim % rows.dim() or not is_tagged(rows._records, rows._whole.geometry.length):
        return NotImplemented
    return together(rows._like(called(rows._records, 0, index), None))


@row_op(aten.cat.default)
def _cat(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pieces of columns, gathered: whole rows."""
    pieces, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    whole = pieces[0]._whole
    length = whole.geometry.length
    if dim not in (1, -1) or whole.total != len(pieces) * whole.shape[1]:
        return NotImplemented
    if not all(isinstance(p, StowedRows) and is_tagged(p._records, length) for p in pieces):
        return NotImplemented
    records = [p._records[:, :length] for p in pieces]
    joined = join_columns(records, whole.storage, whole.shape[0], whole.total)
    joined = torch.cat([joined, pieces[0]._records[:, length:]], 1)
    whole = whole._replace(shape=(whole.shape[0], whole.total), total=None)
    return together(StowedRows(joined, pieces[0]._shared(), whole, pieces[0]._place.at(None)))


@row_op("_c10d_functional::_wrap_tensor_autograd")  # of Python: there once DTensor is
def _gathered(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """No wrapper that waits later: what comes next reads the records at once."""
    return _wait(functional.wait_tensor.default, args, kwargs)


@row_op(c10d.scatter_.default)
def _scatter(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Records from one process to each; the shared parts of that process to all."""
    outputs, inputs, group, root, is_async, *rest = args
    if any(rows._place.room is not None for rows in outputs):
        weight = f"{list(outputs[0].shape)} as {outputs[0].resting}"
        raise Unsupported(
            f"stowage: a resting weight must be prepared before it is distributed, got {weight}; "
            + PREPARE
        )
    for part in (part for rows in outputs for part in rows._shared()):
        c10d.broadcast_([octets(part)], group, root, 0, False, *rest)
    records = [rows._records for rows in outputs]
    given = [[rows._records for rows in several] for several in inputs]
    _, work = called(records, given, group, root, is_async, *rest)
    at = torch.distributed.ProcessGroup.unbox(group).rank()
    for rows in outputs:  # made like those of the first process
        if rows._whole.total is None:
            rows._place.first = at * rows.shape[0]
    return outputs, work

# SPDX-License-Identifier: Apache-2.0
"""Init values of weights that are spread over processes: how they go along with the rows, and what
an in-place init does to rows while they are being initialised."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stowage._ops import _torch
from stowage._ops._torch import tree_map_only
from stowage._ops.errors import Unsupported
from stowage._shard.fragments import amaxes, largest_of, row_parts, rows_fragment
from stowage._shard.groups import groups_of
from stowage._shard.rows import StowedRows
from stowage._tensor.stowed import initialising


def takes_over(into: StowedRows, values: Any) -> bool:
    """Whether `into` is memory that was made to hold this very weight: FSDP2 shards, or pads."""
    if into._origin is None or not isinstance(values, StowedRows):
        return False
    theirs = values._parent or values._origin
    return theirs is not None and into._origin.made_for() is theirs


def follow(into: StowedRows, values: StowedRows) -> None:
    """`into` has got the records of `values`: with the origin, or it has been overwritten."""
    mine = into._origin
    if mine is None:
        return
    if not takes_over(into, values):
        mine.written()
    elif values._parent is None:
        into._place.origin = values._origin
    elif values.first is not None:
        last = values.first + values.shape[0]
        into._place.origin = values._parent.of_rows(values.first, last, mine.share)


def initialise(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operator that writes on exact values, and makes the records from them: all processes
    must do so alike, since scales may depend on all rows."""
    written: list[tuple[StowedRows, Tensor]] = []
    for i, argument in enumerate(_torch.schema(called).arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = kwargs.get(argument.name, args[i] if i < len(args) else None)
        for rows in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(rows, StowedRows) and rows.is_meta:
                return rows
            if isinstance(rows, StowedRows) and initialising(rows):
                written.append((rows, _opened(rows)))
    exact = {id(rows): value for rows, value in written}

    def stand_in(rows: StowedRows) -> Tensor:
        found = exact.get(id(rows))
        return rows.dequantize() if found is None else found

    result = called(
        *tree_map_only(StowedRows, stand_in, args), **tree_map_only(StowedRows, stand_in, kwargs)
    )
    given = {id(value): rows for rows, value in written}
    for rows, value in written:
        settle(rows, value)
        rows._origin.initialised(value)
    return tree_map_only(Tensor, lambda t: given.get(id(t), t), result)


def _opened(rows: StowedRows) -> Tensor:
    exact: Tensor = rows._origin.opened(rows)
    if exact.shape != rows.shape:
        raise Unsupported(
            "stowage: rows that are spread over processes must be initialised whole, got "
            f"{rows.shape[0]} rows of {exact.shape[0]}"
        )
    return exact


@torch.no_grad()
def settle(rows: StowedRows, exact: Tensor) -> None:
    """Makes the records of `rows` from exact values; zeros stand for what is not finite yet."""
    whole = rows._whole
    first = whole.shape[0] if rows.first is None or not rows.shape[0] else rows.first
    values = exact
    if not largest_of(exact).isfinite():
        values = exact.nan_to_num(0.0, 0.0, 0.0)
    fragment = rows_fragment(whole.storage, whole.shape, first, values)
    largest = amaxes(fragment)
    if len(largest):
        for group in _groups(rows):
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    put(rows, *row_parts(fragment, largest))
    rows._origin.written()


def _groups(rows: StowedRows) -> tuple[Any, ...]:
    """Of the processes that have the other rows, as the parameter says whose rows these are."""
    module, name = rows._origin.owner()
    spread = None if module is None else _torch.parameters(module).get(name)
    held = _torch.local_of(spread)
    if spread is held or getattr(held, "_origin", None) is not rows._origin:
        if rows._is_all():
            return ()
        raise Unsupported(
            f"stowage: {rows._origin.name} must be initialised as a parameter of its module, since "
            f"its scales depend on the rows of other processes, got {rows!r}"
        )
    return groups_of(spread)


def put(rows: StowedRows, records: Tensor, shared: list[Tensor]) -> None:
    """Other bytes for the same rows, in place."""
    rows._records.copy_(records)
    for mine, fresh in zip(rows._shared(), shared, strict=True):
        mine.copy_(fresh)

# SPDX-License-Identifier: Apache-2.0
"""Matrices that are tensors of their own in a file and lie in one stack [E, O, K] of a model: what
the stack rests as, and where in its parts those of a matrix lie. Nothing is widened: codes and
scales change their place alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stowage._files.in_common import NotInCommon
from stowage._ops.memory import octets
from stowage._ops.storage import Storage

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StackPlace:
    """Of a matrix [rows, K] in a stack."""

    stack: str  # the name of the stack
    shape: Shape  # of the stack
    storage: Storage | None  # of the stack; None: plain
    index: int  # of dim 0
    first: int  # of dim 1: its first row

    def values(self, stack: torch.Tensor, shape: Shape) -> torch.Tensor:
        """The matrix as a view of the stack's values."""
        return stack[self.index, self.first : self.first + shape[0]]

    def parts(
        self, parts: Sequence[torch.Tensor], storage: Storage, shape: Shape
    ) -> list[torch.Tensor]:
        """Views of the stack's parts that have the values of the matrix's, in the shapes of these;
        but one number of a matrix lies there once for each of its rows, [rows] or [1]."""
        found = []
        for part, (_, _, sizes) in zip(parts, storage.layout(shape), strict=True):
            lead = sizes[0] if sizes else (shape[0] if part.shape[1] > 1 else 1)
            lines = part.view(self.shape[0], self.shape[1] * lead // shape[0], -1)
            at = self.first * lead // shape[0]
            own = lines[self.index, at : at + lead]
            found.append(own.view(sizes) if sizes else own.view(lead))
        return found

    def taken(
        self, name: str, parts: Sequence[torch.Tensor], storage: Storage, shape: Shape
    ) -> list[torch.Tensor]:
        """The parts of the matrix, as its file has them. Raises NotInCommon where its rows have
        another scale, or number over scales, than one another, and the file has one for all."""
        found = self.parts(parts, storage, shape)
        named = zip(found, storage.layout(shape), strict=True)
        for i, (part, (what, _, sizes)) in enumerate(named):
            if sizes:
                continue
            if not torch.equal(octets(part), octets(part[:1].expand_as(part).contiguous())):
                raise NotInCommon(name, what, f"{self.stack} has made one for each")
            found[i] = part[0]
        return found


def put(places: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
    """Copies the parts of a matrix to its places."""
    for into, part in zip(places, parts, strict=True):
        into.copy_(part)


def storage_of(storage: Storage, shape: Shape, alone: bool) -> Storage | str:
    """What matrices of this storage and shape rest as in a stack, where each is `alone` at its
    index or lies above or below others; or what keeps them from it."""
    rows, columns = shape
    if storage.kind == "none":
        return storage
    if storage.nested or storage.scaler_block:
        return "scales of each matrix stand under a number of its own, and a stack has one for all"
    if storage.actorder:
        return "each matrix has its own order of columns, and a stack has one for all"
    if storage.flat:
        if rows * columns % storage.block:
            return f"blocks of {storage.block} would run on from one matrix into the next"
    elif storage.kind == "tensor":
        return storage.of_kind("row" if alone else "row2")
    elif storage.kind == "row":
        return storage.of_kind("row2")
    elif storage.kind == "block":
        if columns % storage.block:
            return f"blocks of {storage.block} would run on from one row into the next"
        if storage.under_one:
            of_matrix = storage.under_one_of_all
            return storage.under("row" if of_matrix and alone else "row2")
    elif storage.kind == "block2":
        if not alone and rows % storage.rows:
            return f"blocks of {storage.rows} rows would run on from one matrix into the next"
    else:
        return f"{storage} has no scales of a matrix in a stack"
    return storage

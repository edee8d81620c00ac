# SPDX-License-Identifier: Apache-2.0
"""Rows of one tensor of a file that are a parameter of their own in a model, and the way back.
Nothing is widened: codes and scales are taken as they lie, and what all rows have in common, each
parameter has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stowage._files.in_common import NotInCommon
from stowage._ops.memory import octets
from stowage._ops.storage import Storage
from stowage._tensor.slices import rows_of_parts

Shape = tuple[int, ...]
Piece = tuple[int, list[torch.Tensor]]  # its first row in the file, and what lies there


@dataclass(frozen=True)
class RowCut:
    """Rows of a tensor of a file."""

    whole: str  # its name
    shape: Shape  # of all of it
    runs: tuple[tuple[int, int], ...]  # [first, last), in the order of the model

    @property
    def name(self) -> str:
        return f"{self.whole}[{', '.join(f'{first}:{last}' for first, last in self.runs)}]"

    @property
    def own_shape(self) -> Shape:
        return (sum(last - first for first, last in self.runs), *self.shape[1:])

    @property
    def is_view(self) -> bool:
        """Whether its rows lie in the file one after the other, as in the model."""
        return len(self.runs) == 1

    def problem(self, storage: Storage | None) -> str:
        """Why a weight of such a storage has no parts of these rows; "" if it has."""
        if storage is None:
            return ""
        if len(self.shape) != 2 or storage.transposed or storage.nested or storage.scaler_block:
            return f"{storage} {list(self.shape)} has no rows that rest by themselves"
        for first, last in self.runs:
            ends = [first] if last == self.shape[0] else [first, last]
            if storage.flat and any(end * self.shape[1] % (2 * storage.block) for end in ends):
                return f"blocks of {storage.block} run on across the ends of rows {first} to {last}"
            if any(end % storage.rows_together(self.shape) for end in ends):
                if storage.by_columns:
                    return f"groups of columns have rows outside of rows {first} to {last}"
                return f"blocks of {storage.rows} rows run on across rows {first} to {last}"
        return ""

    def values(self, whole: torch.Tensor) -> torch.Tensor:
        """Its rows of a plain tensor: a view where they are one run."""
        found = [whole[first:last] for first, last in self.runs]
        return found[0] if self.is_view else torch.cat(found)

    def parts(self, whole: Sequence[torch.Tensor], storage: Storage) -> list[torch.Tensor]:
        """Its parts: of one run views of the whole's."""
        found = [_rows(whole, storage, self.shape, run) for run in self.runs]
        if self.is_view:
            return found[0]
        of_rows = zip(*(parts[: storage.in_rows] for parts in found), strict=True)
        return [*map(torch.cat, of_rows), *found[0][storage.in_rows :]]

    def pieces(self, values: torch.Tensor) -> list[Piece]:
        """The way back, of a plain parameter."""
        return [(at, [values[first:last]]) for at, first, last in self._places()]

    def pieces_of(self, parts: Sequence[torch.Tensor], storage: Storage) -> list[Piece]:
        """The way back, of one that rests."""
        return [
            (at, _rows(parts, storage, self.own_shape, (first, last)))
            for at, first, last in self._places()
        ]

    def _places(self) -> list[tuple[int, int, int]]:
        """Of each run its first row in the file, and its rows in the model."""
        found, begin = [], 0
        for first, last in self.runs:
            found.append((first, begin, begin + last - first))
            begin += last - first
        return found


def _rows(
    parts: Sequence[torch.Tensor], storage: Storage, shape: Shape, run: tuple[int, int]
) -> list[torch.Tensor]:
    found = rows_of_parts(parts, storage, shape, *run)
    assert found is not None  # RowCut.problem() says why not
    return found


def joined(
    name: str, owners: Sequence[str], pieces: Sequence[Piece], part: int, what: str
) -> torch.Tensor:
    """A part of the whole, from the pieces of all its rows; `what` all rows have in common, ""
    for a part that has something of each. Raises NotInCommon where `owners` have another than
    one another, and the file has one for all."""
    found = [parts[part] for _, parts in sorted(pieces, key=lambda piece: piece[0])]
    if not what:
        return torch.cat(found)
    if not all(torch.equal(octets(each), octets(found[0])) for each in found[1:]):
        raise NotInCommon(name, what, f"{' or '.join(owners)} has made another")
    return found[0]

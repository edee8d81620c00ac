# SPDX-License-Identifier: Apache-2.0
"""A single file in which weights rest, for `from_single_file` of diffusers, which gives tensors the
names and rows that its models have. In the place of what rests it gets the numbers of its rows:
what has become of these tells which rows each parameter is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

import torch
from torch import nn

from stowage._files import originals
from stowage._files.names import Entry
from stowage._files.row_cuts import RowCut
from stowage._files.sources import FileSource, is_aligned
from stowage._ops.errors import InvalidArgument, raise_problems
from stowage._tensor.stowed import VALUE_DTYPES
from stowage._tiers.load import RestingLoad

_ROWS = 1 << 32  # more than a tensor has

Run = tuple[int, int]  # rows [first, last)


class SingleFile:
    """Of one load. Close it after use.

    Args:
        path: the file.
        names: of tensors that diffusers has found in it.

    Raises:
        InvalidArgument: they are those of another file.
        BadFile: the file is damaged.
    """

    def __init__(self, path: str, names: Iterable[str]) -> None:
        self._source = FileSource(path)
        self._entries = list(self._source.entries.values())
        if other := [name for name in names if name not in self._source.tensors()]:
            self.close()
            raise InvalidArgument(
                f"StowageConfig: {path} must be the file that from_single_file reads, has no "
                f"{other[0]}"
            )

    def state(self) -> dict[str, torch.Tensor]:
        """Plain tensors as they are, and numbers of rows for what rests."""
        return {
            entry.name: self._values(entry) if _is_plain(entry) else _numbers(entry, index)
            for index, entry in enumerate(self._entries)
        }

    def _values(self, entry: Entry) -> torch.Tensor:
        found = self._source.private(entry.name, None)
        return self._source.copy(entry.name) if found is None or not is_aligned(found) else found

    def resting(self, model: nn.Module, state: dict[str, torch.Tensor]) -> RestingLoad:
        """What rests in the file, as the model has it.

        Args:
            model: on the meta device.
            state: what diffusers has made of `state()`; it is left with plain tensors.

        Returns:
            The load of these weights.

        Raises:
            InvalidArgument: rows that cannot rest as the model wants them, with all reasons.
        """
        numbers = {
            name: state.pop(name)
            for name, _ in model.named_parameters()
            if name in state and state[name].dtype is torch.int64
        }
        if original := originals.adopt(self._source, model, None, strict=False):
            return RestingLoad(model, self._source, original[1])
        problems: list[str] = []
        found = dict(self._rows(numbers, problems))
        raise_problems(f"StowageConfig: {self._source.where}", problems)
        cut = {entry.whole.name for entry in found.values()}
        entries = [entry for entry in self._entries if entry.name not in cut]
        names: dict[str, str | None] = {e.name: e.name if _is_plain(e) else None for e in entries}
        names |= {entry.name: name for name, entry in found.items()}
        self._source.entries = {entry.name: entry for entry in (*entries, *found.values())}
        return RestingLoad(model, self._source, names.get)

    def _rows(
        self, numbers: Mapping[str, torch.Tensor], problems: list[str]
    ) -> Iterator[tuple[str, Entry]]:
        """The entries that parameters are, by their names."""
        taken: dict[str, list[Run]] = {}
        for name, found in numbers.items():
            index, runs = _runs(found)
            if index not in range(len(self._entries)):
                problems.append(f"{name}: must be rows of one tensor, diffusers has made others")
                continue
            entry = self._entries[index]
            taken.setdefault(entry.name, []).extend(runs)
            if runs == [(0, entry.shape[0])]:
                yield name, entry
                continue
            cut = RowCut(entry.name, entry.shape, tuple(runs))
            if why := cut.problem(entry.storage):
                problems.append(f"{entry.name}: must have rows that can be {name}, {why}")
                continue
            yield name, replace(entry, name=cut.name, shape=cut.own_shape, cut=cut)
        for name, each in taken.items():
            rows = self._source.entries[name].shape[0]
            if [first for first, _ in sorted(each)] + [rows] != [0, *(b for _, b in sorted(each))]:
                problems.append(f"{name}: must have each of its rows in the model once")

    def close(self) -> None:
        """Lets the file go, where nothing of the model lies in it."""
        self._source.close()


def _is_plain(entry: Entry) -> bool:
    """Codes without scales, and types that torch does not have, are not."""
    is_values = entry.dtype is not None and (
        entry.dtype in VALUE_DTYPES or not entry.dtype.is_floating_point
    )
    return entry.storage is None and is_values


def _numbers(entry: Entry, index: int) -> torch.Tensor:
    rows = torch.arange(entry.shape[0]) + index * _ROWS
    return rows.view(-1, *[1] * (len(entry.shape) - 1))


def _runs(numbers: torch.Tensor) -> tuple[int, list[Run]]:
    """Of which entry rows are, and which; -1 where they are of several."""
    rows = numbers.reshape(numbers.shape[0], -1)[:, 0]
    index = int(rows[0]) // _ROWS
    if bool((rows // _ROWS != index).any()):
        return -1, []
    starts = [0, *((rows.diff() != 1).nonzero().flatten() + 1).tolist(), len(rows)]
    each = [rows[a:b] % _ROWS for a, b in pairwise(starts)]
    return index, [(int(run[0]), int(run[-1]) + 1) for run in each]

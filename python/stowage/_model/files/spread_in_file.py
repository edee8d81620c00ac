# SPDX-License-Identifier: Apache-2.0
"""Fills a model that is spread over processes, and leaves in the file what can be left there: whole
weights, and matrices of stacks that DTensor cuts along dim 0. Of all else that is spread, which
torch gathers or multiplies, the rows here are read into memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor, nn

from stowage._files.names import Entry
from stowage._files.sources import FileSource
from stowage._model.choice.selection import Selection
from stowage._model.files.fill import Assignment, Filling, Options
from stowage._model.files.spread import Spread, give, in_step
from stowage._model.sizes import nbytes
from stowage._model.weights import Choice, Held
from stowage._ops import _torch
from stowage._ops.errors import raise_problems
from stowage._shard.local_shards import is_spread
from stowage._shard.own_matrices import (
    gathered,
    left_in_file,
    let_go,
    obstacle_to_file,
    own_matrices,
)


class SpreadInFile(Spread):
    """The plan of such a load."""

    def __init__(
        self, model: nn.Module, source: FileSource, selection: Selection | None, options: Options
    ) -> None:
        self._gathered = gathered(model)
        super().__init__(model, source, selection, replace(options, stays=self._is_by_rows))

    def _is_by_rows(self, held: Held) -> bool:
        return is_spread(held.tensor) and not left_in_file(held.tensor, self._gathered)

    def _fits_alone(self, held: Held, name: str) -> bool:
        return self._is_by_rows(held) or any(s.entry.name == name for s in self._by_rows())

    def _by_rows(self) -> list[Assignment]:
        return [step for step in self._steps if self._is_by_rows(step.held)]

    def _to_execute(self) -> list[Assignment]:
        return [step for step in self._steps if not self._is_by_rows(step.held)]

    def _decide(self, held: Held, entry: Entry, choice: Choice | None) -> None:
        mesh = getattr(held.tensor, "device_mesh", None)
        if mesh is not None and mesh.device_type != "cpu":
            self.problems.append(f"{held.name}: must be on the CPU beside a file, is on {mesh}")
            return
        kind = Spread if self._is_by_rows(held) else Filling
        kind._decide(self, held, entry, choice)

    def _bound(self, tensor: Tensor, entry: Entry, rests: bool) -> str:
        if not is_spread(tensor):
            return super()._bound(tensor, entry, rests)
        return obstacle_to_file(tensor, entry.storage is not None)

    def _placed(self, tensor: Tensor, step: Assignment) -> Tensor:
        return own_matrices(tensor, step.held.tensor)

    def bytes_beside(self) -> int:
        return sum(nbytes(_torch.local_of(step.held.tensor)) for step in self._by_rows())

    def execute(self) -> Callable[[], None]:
        """As Filling's. What torch gathers is read when all processes have come so far, since it
        takes the place of what is there."""
        in_file = super().execute()
        left = frozenset(id(step.held.tensor) for step in self._to_execute())

        def commit() -> None:
            with in_step():
                made = self.filled(keep_nonfinite=False)
                self._source.check()  # before the problems: values that were lost make their own
                raise_problems(f"stowage.sharding.load: {self._source.where}", self.problems)
            let_go(self.inventory.model, left)
            give(self.inventory, made)
            in_file()

        return commit

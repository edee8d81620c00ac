# SPDX-License-Identifier: Apache-2.0
"""Who a weight belongs to, how many times it has been written, and what torch's gathers cannot do
with it, found before one of them runs.

FSDP2 replaces the tensor of a parameter several times, and every one of them needs the name, the
recipe and the module: they carry one `Layer`. Tensors that share memory share one `Stamp`.
"""

import copy
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from stowage._ops import _torch
from stowage._ops.errors import raise_problems
from stowage._shard.reshard_check import reshard_problems
from stowage.training.cuts import WHOLE, Cut
from stowage.training.recipes import Recipe

Watched = tuple[tuple["weakref.ref[Tensor]", int], ...]  # parameters, each with torch's version


def watched(*parameters: Tensor) -> Watched:
    """Parameters through which compiled graphs, such as an optimizer's, write uncounted."""
    return tuple([(weakref.ref(p), _torch.version(p)) for p in parameters if not p.is_inference()])


class Stamp:
    """A count of writes to some memory, and the scale of its values after one of them."""

    def __init__(self) -> None:
        self.writes = 0
        self._scale: Tensor | None = None
        self._scaled_at = -1
        self._watched: Watched = ()
        self._copied: tuple[Stamp, int] | None = None  # of this memory, after so many writes

    def fresh_scale(self) -> Tensor | None:
        """The scale, unless something was written since."""
        if self._scaled_at == self.writes:
            return None if self._written_by_graphs() else self._scale
        if self._copied is not None and not self.writes:
            source, writes = self._copied
            return source.fresh_scale() if source.writes == writes else None
        return None

    def set_scale(self, scale: Tensor, seen: Watched = ()) -> None:
        """The scale of the values that are here now; `seen` as they were read."""
        self._scale, self._scaled_at, self._watched = scale, self.writes, seen

    def _written_by_graphs(self) -> bool:
        found = ((reference(), version) for reference, version in self._watched)
        return any(
            tensor is not None and _torch.version(tensor) != version for tensor, version in found
        )

    def copied(self) -> "Stamp":
        """For other memory that holds the same values."""
        stamp = Stamp()
        stamp._copied = (self, self.writes)
        return stamp


class Roster:
    """The layers that were converted together, whose scales one reduction makes."""

    def __init__(self, model: nn.Module, refresh: Callable[["list[Layer]"], None]) -> None:
        self.layers: list[Layer] = []
        self._model: Callable[[], nn.Module | None] = weakref.ref(model)
        self._refresh = refresh
        self._gathered = False

    def before_gather(self) -> None:
        """Before the first gather, refuses what cannot work: on every rank, so that none waits."""
        if not self._gathered and (model := self._model()) is not None:
            check(model)
        self._gathered = True

    def refresh(self) -> None:
        """Updates every scale."""
        self._refresh([layer for layer in self.layers if layer.alive])

    def __deepcopy__(self, memo: dict[int, Any]) -> "Roster":
        old = self._model()
        model = nn.Module() if old is None else memo.get(id(old), old)
        memo[id(self)] = result = Roster(model, self._refresh)
        return result


class Layer:
    """A converted weight: its name, recipe and (first) module."""

    def __init__(self, name: str, recipe: Recipe, module: nn.Module, roster: Roster) -> None:
        self.name, self.recipe, self.roster = name, recipe, roster
        self._module = weakref.ref(module)
        self.amax: Tensor | None = None  # delayed: of the weight, over all ranks, as of its scale
        self.number: Tensor | None = None  # delayed: how a compiled graph finds it
        self.gathered_in_graph = False  # so that compiled graphs must read it after the gather
        self.code: tuple[Any, int] | None = None  # that ranks compare, and what it was made of
        self.shared = False  # by several modules
        self.cut: Cut = WHOLE  # by tensor parallelism
        self.row_scales: Tensor | None = (
            None  # of all rows, where others have some of their columns
        )
        self._shard: Any = None  # while the module holds the gathered weight, the shard it rests in
        roster.layers.append(self)

    @property
    def alive(self) -> bool:
        return self._module() is not None

    @property
    def module(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise RuntimeError(f"stowage: the module of weight {self.name} must exist, it is gone")
        return module

    def resting(self, kind: type[Tensor]) -> tuple[Any, Any]:
        """The tensor of `kind` that the optimizer writes to and, if it is sharded, its DTensor."""
        parameter: Any = self.module.weight
        if type(parameter) is kind:
            return parameter, None
        if type(_torch.local_of(parameter)) is kind:
            self._shard = parameter
        if self._shard is None:
            return None, None
        return _torch.local_tensor(self._shard), self._shard

    @property
    def parallel(self) -> bool:
        """Whether tensor parallelism has the weight, if only whole on each rank."""
        return self.cut.group is not None

    @property
    def cuts_rows(self) -> bool:
        """Whether each row has one scale, and its columns lie on several ranks."""
        return self.recipe.rows and self.cut.columns

    def __deepcopy__(self, memo: dict[int, Any]) -> "Layer":
        module = memo.get(id(self.module), self.module)
        roster = copy.deepcopy(self.roster, memo)
        memo[id(self)] = result = Layer(self.name, self.recipe, module, roster)
        result.shared, result.cut = self.shared, self.cut
        result.gathered_in_graph = self.gathered_in_graph  # guards of graphs compare a copy
        return result


def check(model: nn.Module) -> None:
    """Checks that float8 weights can work as a model is sharded; the first gather does so too.

    Args:
        model: a module after `fully_shard`.

    Raises:
        InvalidArgument: names the modules whose sharding cannot work.

    Example:
        >>> stowage.training.convert_float8(model)
        >>> fully_shard(model, mesh=mesh)
        >>> stowage.training.check(model)
    """
    raise_problems("stowage", reshard_problems(model))

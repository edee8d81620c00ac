# SPDX-License-Identifier: Apache-2.0
"""What became of each use of each weight that an engine fetches: a table by layer, and how often
each expert was used, kept for the next run."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from stowage._ops.errors import BadFile, InvalidArgument
from stowage._ops.texts import read_text, write_text
from stowage._tiers.counts import WeightUses
from stowage._tiers.disk.engine import Engine, engine_of

_VERSION = 1
_COLUMNS = ("layer", "uses", "hits", "late", "missed", "ahead", "in vain", "waited", "experts")


@dataclass(frozen=True)
class Uses:
    """What became of each use of each weight in a file, by its name there: of `stowage.uses`.
    `print` shows a table by layer.

    Example:
        >>> uses = stowage.Uses({"layers.0.experts": stowage.WeightUses(hits=3, by_index=(2, 1))})
        >>> uses.layers["layers.0"].hits
        3
    """

    weights: Mapping[str, WeightUses]  #: by name in the file; those that were used or prefetched

    @property
    def layers(self) -> dict[str, WeightUses]:
        """The sums of each layer, which is what names have up to their last number but that of an
        expert: the uses by index are those of the stack with the most of them, or of a list's
        experts up to the last that was used."""
        found: dict[str, WeightUses] = {}
        for name, uses in self.weights.items():
            expert = _OF_LIST.match(name)
            layer = _layer_of(name if expert is None else expert[1])
            before = found.get(layer, WeightUses())
            by_index = max(before.by_index, uses.by_index, key=sum)
            if expert is not None and len(uses.by_index) == 1:
                by_index = _at_least(before.by_index, int(expert[2]), uses.by_index[0])
            found[layer] = before._plus(uses)._replace(by_index=by_index)
        return found

    def since(self, earlier: Uses) -> Uses:
        """What was used between two calls.

        Args:
            earlier: of the same model, taken before.

        Returns:
            The differences.
        """
        past = {
            n: u._plus(earlier.weights.get(n, WeightUses()), -1) for n, u in self.weights.items()
        }
        return Uses({name: uses for name, uses in past.items() if uses.acquired or uses.ahead})

    def to_json(self) -> str:
        """The uses as JSON.

        Returns:
            What `save` writes.
        """
        weights = {name: uses._asdict() for name, uses in self.weights.items()}
        return json.dumps({"stowage_uses": _VERSION, "weights": weights}, indent=1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes them as JSON, for `stowage.foresee` and `stowage.plan` in another run.

        Args:
            path: the file.

        Raises:
            FileError: it cannot be written.
        """
        write_text(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Uses:
        """Reads what `save` wrote.

        Args:
            path: the file.

        Returns:
            The uses.

        Raises:
            BadFile: it holds no uses of this version.
            FileError: it cannot be read.
        """
        text = read_text(path)
        try:
            return cls(_weights_of(json.loads(text)))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise BadFile(
                f"{path}: must hold uses of version {_VERSION}, as Uses.save writes them"
            ) from None

    def __str__(self) -> str:
        lines = [_COLUMNS, *(_line(layer, uses) for layer, uses in self.layers.items())]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(
                text.ljust(width) if column == 0 else text.rjust(width)
                for column, (text, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )


def _weights_of(document: Any) -> dict[str, WeightUses]:
    if document["stowage_uses"] != _VERSION:
        raise ValueError
    found = {}
    for name, counts in document["weights"].items():
        by_index = counts.pop("by_index")
        numbers = [*counts.values(), *by_index]
        if not all(isinstance(n, int | float) and n >= 0 for n in numbers):
            raise ValueError
        found[name] = WeightUses(**counts, by_index=tuple(map(int, by_index)))
    return found


_OF_LIST = re.compile(r"(.*experts)\.(?:expert_)?(\d+)\.")


def _at_least(counts: tuple[int, ...], index: int, count: int) -> tuple[int, ...]:
    every = [*counts, *[0] * (index + 1 - len(counts))]
    every[index] = max(every[index], count)
    return tuple(every)


def _layer_of(name: str) -> str:
    parts = name.split(".")
    last = max((i for i, part in enumerate(parts) if part.isdecimal()), default=len(parts))
    return ".".join(parts[: last + 1])


def _line(layer: str, uses: WeightUses) -> tuple[str, ...]:
    of = max(uses.acquired, 1)
    experts = f"{sum(n > 0 for n in uses.by_index)} of {len(uses.by_index)}"
    return (
        layer,
        str(uses.acquired),
        f"{uses.hits / of:.0%}",
        f"{uses.late / of:.0%}",
        str(uses.misses),
        str(uses.ahead),
        str(uses.unused),
        f"{uses.stall * 1000:.1f} ms",
        experts if uses.by_index else "",
    )


def uses(model: nn.Module) -> Uses:
    """What became of each use of each weight that rests in a file, since `offload` or `load(ram=)`.

    Args:
        model: a module whose weights an engine fetches.

    Returns:
        By weight, and by layer when it is printed; of stacks of experts also how often each was
        used. Weights that were never used or read are left out.

    Raises:
        InvalidArgument: the model has no weights in a file.

    Example:
        >>> stowage.stow(model, "int8")
        >>> stowage.offload(model, ram="64KiB", folder="weights")
        >>> y = model(x)
        >>> stowage.uses(model).weights["0.weight"].acquired
        1
    """
    return Uses(_engine("uses", model).uses())


def foresee(model: nn.Module, uses: Uses | str | os.PathLike[str]) -> None:
    """Begins with what another run has learnt: of experts those stay that were used most there,
    until use here says otherwise, and as many as have room beside the weights of every pass are
    read before the first use. No result changes.

    Args:
        model: one that was offloaded or loaded with `ram`, and not used since.
        uses: of the same weights, or where `Uses.save` wrote them.

    Raises:
        BadFile: the file holds none.
        FileError: it cannot be read.
        InvalidArgument: the model has no weights in a file or was used already, or the uses are of
            another one's.

    Example:
        >>> stowage.stow(model, "int8")
        >>> stowage.offload(model, ram="64KiB", folder="weights")
        >>> stowage.foresee(model, stowage.Uses({"0.weight": stowage.WeightUses(hits=9)}))
    """
    given = uses if isinstance(uses, Uses) else Uses.load(uses)
    stacks = {name: of.by_index for name, of in given.weights.items() if of.by_index}
    _engine("foresee", model).foresee(stacks)


def _engine(what: str, model: nn.Module) -> Engine:
    engine = engine_of(model)
    if engine is None:
        raise InvalidArgument(
            f"stowage.{what}: the model must have weights in a file (stowage.offload with a "
            "folder, or stowage.load with ram=), got one that has none"
        )
    engine.settle(model)
    return engine

# SPDX-License-Identifier: Apache-2.0
"""Files in the layout of a model's first authors as models of diffusers: other names, and tensors
whose rows are several parameters there. What is what, a table says, of each class of models."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from types import ModuleType

from torch import nn
from torch.nn.parameter import is_lazy

from stowage._files import flux
from stowage._files.names import Entry
from stowage._files.renames import Rename, Renaming
from stowage._files.row_cuts import RowCut
from stowage._files.sources import FileSource
from stowage._ops.errors import BadFile, raise_problems

_PREFIX = "model.diffusion_model."  # of ComfyUI's checkpoints, which may have other models too
_LAYOUTS = {"FluxTransformer2DModel": flux}
DIALECTS = tuple(layout.DIALECT for layout in _LAYOUTS.values())


@dataclass(frozen=True)
class _Wanted:
    """Parameters of a model that are rows of one tensor, in the order of these."""

    names: list[str]
    shapes: list[tuple[int, ...]]
    swapped: bool  # one, with the halves of its rows in turn

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(shape[0] for shape in self.shapes), *self.shapes[0][1:])

    def cuts(self, entry: Entry) -> Iterator[tuple[str, RowCut]]:
        """Of the tensor, if it has their shape, with the name that the model has for each."""
        ends = [0]
        for shape in self.shapes:
            ends.append(ends[-1] + shape[0])
        for name, (first, last) in zip(self.names, pairwise(ends), strict=True):
            half = (first + last) // 2
            runs = ((half, last), (first, half)) if self.swapped else ((first, last),)
            yield name, RowCut(entry.name, entry.shape, runs)


def adopt(
    source: FileSource, model: nn.Module, rename: Rename | None, strict: bool
) -> tuple[str, Rename] | None:
    """The name of the layout, and the rename from now on, where a file has it, under the names that
    it has after `rename`. Entries of several parameters are such of each. None for other files and
    for models that no table has.

    Raises InvalidArgument for tensors that are missing or have rows that cannot be parameters of
    their own, with all reasons; BadFile for a GGUF file of another architecture.
    """
    layout = next(
        (_LAYOUTS[n] for n in map(_class_name, type(model).__mro__) if n in _LAYOUTS), None
    )
    if layout is None:
        return None
    renaming = Renaming(rename)
    named = {
        name.removeprefix(_PREFIX): entry
        for name, entry in renaming.entries(source.entries).items()
    }
    wanted = _wanted(layout, model)
    if not named.keys() & wanted.keys():
        return None
    if source.dialect == "gguf":
        architecture = source.metadata.get("general.architecture", "")
        if architecture != layout.ARCHITECTURE:
            raise BadFile(
                f"{source.where}: general.architecture must be {layout.ARCHITECTURE!r} where "
                f"tensors have its names, got {architecture!r}"
            )
    problems = list(renaming.problems)
    final: dict[str, str] = {}
    entries = {entry.name: entry for entry in source.entries.values()}
    for name, entry in named.items():
        final[entry.name] = name
        if one := wanted.pop(name, None):
            pieces = dict(_pieces(entry, one, problems))
            del entries[entry.name]
            entries |= {piece.name: piece for piece in pieces.values()}
            final |= {piece.name: model_name for model_name, piece in pieces.items()}
    if strict:
        problems += [
            f"{name}: must be in the file, for {' and '.join(one.names)}, is missing"
            for name, one in wanted.items()
        ]
    raise_problems(f"stowage.load: {source.where}", problems)
    source.entries = entries
    return layout.DIALECT, final.get


def _class_name(kind: type) -> str:
    """Of diffusers, which is there if the model is; "" for others."""
    name, package = kind.__name__, sys.modules.get("diffusers")
    is_theirs = name in _LAYOUTS and package is not None and getattr(package, name, None) is kind
    return name if is_theirs else ""


def _wanted(layout: ModuleType, model: nn.Module) -> dict[str, _Wanted]:
    """By the name in the file, what this model has of a layout."""
    held = {name: p for name, p in model.named_parameters() if not is_lazy(p)}
    found: dict[str, _Wanted] = {}
    for pattern, models in layout.PARAMETERS.items():
        number = re.compile(re.escape(models[0]).replace(r"\*", r"(\d+)"))
        for match in filter(None, map(number.fullmatch, held)):
            block = "".join(match.groups())
            names = [each.replace("*", block) for each in models]
            if all(each in held for each in names):
                shapes = [tuple(held[each].shape) for each in names]
                swapped = pattern in layout.SWAPPED
                found[pattern.replace("*", block)] = _Wanted(names, shapes, swapped)
    return found


def _pieces(entry: Entry, wanted: _Wanted, problems: list[str]) -> Iterator[tuple[str, Entry]]:
    """The entries of the parameters that rows of one are, by the model's names."""
    if len(wanted.names) == 1 and not wanted.swapped:
        yield wanted.names[0], entry  # its shape is compared when it is taken
        return
    if entry.shape != wanted.shape:
        problems.append(
            f"{entry.name}: shape must be {list(wanted.shape)}, of {' and '.join(wanted.names)}, "
            f"the file has {list(entry.shape)}"
        )
        return
    for name, cut in wanted.cuts(entry):
        if why := cut.problem(entry.storage):
            problems.append(
                f"{entry.name}: must have rows that can be {name}, {why}; `stowage convert` or "
                "`unpack` writes the file in another form"
            )
            return
        yield name, replace(entry, name=cut.name, shape=cut.own_shape, cut=cut)

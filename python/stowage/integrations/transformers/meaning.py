# SPDX-License-Identifier: Apache-2.0
"""What a configuration means for a model and its files."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from stowage._files.sources import FileSource
from stowage._model.choice.policy import Policy
from stowage._model.choice.skips import Skip
from stowage._ops.errors import BadFile, InvalidArgument
from stowage._ops.storage import Storage
from stowage.integrations.transformers.config import StowageConfig


def policy_of(model: nn.Module, said: StowageConfig) -> Policy | None:
    """What a configuration means for a model."""
    policy = said.policy
    if policy.selection.empty:
        return None
    rules: dict[Any, Any] = {**(policy.rules or {}), **_of_experts(model, policy.storage)}
    return replace(policy, rules=rules, skip=_every_skip(policy.skip, _skipped(model, said)))


def _every_skip(skip: Skip, more: list[str]) -> Skip:
    if not more:
        return skip
    return [*([skip] if isinstance(skip, str) else skip or []), *more]  # type: ignore[misc]


def _of_experts(model: nn.Module, storage: Any) -> dict[str, Any]:
    """Rules for stacks of experts, which the defaults take no more than other parameters of modules
    that are none of torch's. Each row of a matrix has a scale where each row of a weight would."""
    if storage is None:
        return {}
    each = [Storage.parse(one) for one in ([storage] if isinstance(storage, str) else storage)]
    own = [s.name.replace(":row", ":row2", 1) if s.kind == "row" else s.name for s in each]
    return {
        f"{path}.{name}": own if len(own) > 1 else own[0]
        for path, module in model.named_modules()
        if hasattr(module, "has_gate") and hasattr(module, "is_concatenated")
        for name, stack in module.named_parameters(recurse=False)
        if stack.dim() == 3
    }


def _skipped(model: nn.Module, said: StowageConfig) -> list[str]:
    """Globs of modules that are not converted. Raises InvalidArgument for a name that none has."""
    found, paths = [], [path for path, _ in model.named_modules() if path]
    for name in said.modules_to_not_convert or ():
        globs = [one for one in (name, f"*.{name}") if fnmatch.filter(paths, one)]
        if not globs:
            raise InvalidArgument(
                "StowageConfig: modules_to_not_convert must name modules of the model, got "
                f"{name!r}"
            )
        found += globs
    return found


def opened(files: Sequence[str]) -> FileSource | None:
    """The reader of a checkpoint, where weights rest in it; None of a plain one. Its folder tells
    more than its files do, its index and its configuration; but a folder may hold variants too.

    Raises InvalidArgument for what rests in files that are not the folder's own."""
    folder = os.path.dirname(files[0])
    try:
        source = FileSource(folder)
        found, wanted = ({*map(os.path.realpath, paths)} for paths in (source.paths, files))
        if found == wanted:
            return _resting(source)
        source.close()
    except BadFile as error:
        if not str(error).endswith("[folder_ambiguous]"):
            raise
    if len(files) == 1:
        return _resting(FileSource(files[0]))
    for file in files:
        if (source_of_one := _resting(FileSource(file))) is not None:
            source_of_one.close()
            raise InvalidArgument(
                f"StowageConfig: {folder} must have no other files of weights than those that are "
                f"read, such as {file}, in which weights rest"
            )
    return None


def _resting(source: FileSource) -> FileSource | None:
    if any(entry.storage is not None for entry in source.entries.values()):
        return source
    source.close()
    return None

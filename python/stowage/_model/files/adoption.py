# SPDX-License-Identifier: Apache-2.0
"""What a model calls what a file has, where the two are of different makers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from stowage._files import experts, gguf, originals
from stowage._files.renames import Rename
from stowage._files.sources import FileSource


class Adopted(NamedTuple):
    """`rename`, `then` and `dialect` as `Options` and `Template` take them."""

    rename: Rename | None
    then: Mapping[str, str] = {}
    dialect: str = ""  # that the file is written back in; "" for ours and for none


def adopt(
    source: FileSource, model: nn.Module, rename: Rename | None, strict: bool = True
) -> Adopted:
    """The names of a model for those of a file, `rename` where it is given. Entries of the source
    that the model has otherwise (rows of one, matrices in a stack) are such from now on.

    Raises InvalidArgument for what cannot be, with all reasons; BadFile for metadata that
    contradict the tensors.
    """
    original = originals.adopt(source, model, rename, strict)
    if original is not None:
        layout, renamed = original
        return Adopted(renamed, {}, source.dialect or ("" if source.ours else layout))
    if source.dialect == gguf.DIALECT:
        held = (model.named_parameters, model.named_buffers)
        names = {name for named in held for name, _ in named(remove_duplicate=False)}
        return Adopted(gguf.adopt(source, names, rename), {}, source.dialect)
    return Adopted(rename, experts.adopt(source, model, rename), source.dialect)

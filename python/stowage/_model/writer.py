# SPDX-License-Identifier: Apache-2.0
"""Tensors one by one into safetensors files that appear whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from stowage._files.names import DISK_NAMES
from stowage._model.weights import Inventory, is_persistent
from stowage._ops import library
from stowage._ops.errors import translated


def declared(name: str, dtype: torch.dtype, shape: Iterable[int]) -> dict[str, Any]:
    """What `write` must know of a tensor before the first byte."""
    return {"name": name, "dtype": DISK_NAMES[dtype], "shape": list(shape)}


def write(
    path: str | os.PathLike[str],
    tensors: list[dict[str, Any]],
    stream: Iterable[tuple[str, torch.Tensor]],
    *,
    weights: Iterable[Mapping[str, Any]] = (),
    metadata: Mapping[str, str] | None = None,
    shard_bytes: int = 0,
    checksums: bool = True,
    like: list[dict[str, Any]] | None = None,
    index: str = "",
    manifest: bool = True,
) -> None:
    """Declares `tensors`, reserves the space, takes each from `stream` in turn, and publishes.

    What goes wrong leaves nothing behind. `like`: the files of another tool, whose headers are
    written again and declare everything, with the text of their `index`.
    Without `manifest` the files are of a peer's dialect alone. Raises FileError (no
    space, not writable) before a byte is written, and InvalidArgument for names that are not
    declared."""
    declaration = {
        "tensors": tensors,
        "weights": list(weights),
        "metadata": dict(metadata or {}),
        "shard_bytes": shard_bytes,
        "checksums": checksums,
        "like": [form | {"header": form["header"].hex()} for form in like or []],
        "index": index,
        "manifest": manifest,
    }
    try:
        writer = library.writer_open(os.fspath(path), json.dumps(declaration))
        try:
            for name, tensor in stream:
                plain = tensor.detach().cpu().contiguous().reshape(-1)
                library.writer_write(writer, name, plain.view(torch.uint8))
                del tensor, plain  # before the next one is made
        except BaseException:
            library.writer_discard(writer)
            raise
        library.writer_finish(writer)
    except RuntimeError as error:
        raise translated(error) from None


def buffer_dtypes(inventory: Inventory) -> dict[str, str]:
    """Computed buffers are made again by the model's constructor, in its dtype, not in this one."""
    dtypes = {
        held.name: str(held.tensor.dtype).removeprefix("torch.")
        for held in inventory.buffers
        if not is_persistent(held) and held.tensor.is_floating_point()
    }
    return {"stowage.buffer_dtypes": json.dumps(dtypes)} if dtypes else {}

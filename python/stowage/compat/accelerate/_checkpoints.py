# SPDX-License-Identifier: Apache-2.0
"""Where a checkpoint's tensors are: a safetensors file, an index, a pickle of torch, or a folder
with one of these."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from stowage._files.names import label
from stowage._files.sources import DictSource, FileSource
from stowage._ops.errors import BadFile, FileError, InvalidArgument
from stowage.compat.accelerate._maps import place_of
from stowage.compat.accelerate._writing import read_index

WEIGHTS_NAME, SAFE_WEIGHTS_NAME = "pytorch_model.bin", "model.safetensors"
Checkpoint = str | os.PathLike[str]


def load_state_dict(
    checkpoint_file: Checkpoint, device_map: Mapping[str, Any] | None = None
) -> dict[str, torch.Tensor]:
    """The tensors of one file, safetensors or a pickle of weights only, on the devices that
    `device_map` gives their modules; on the CPU where it says "disk" or nothing."""
    path = Path(checkpoint_file)
    state = _safetensors(path) if path.suffix == ".safetensors" else _pickled(path)
    if device_map is None:
        return state
    places = {name: place_of(name, device_map) for name in state}
    return {
        name: tensor if places[name] in (None, "cpu", "disk") else tensor.to(places[name])
        for name, tensor in state.items()
    }


def _safetensors(path: Path) -> dict[str, torch.Tensor]:
    source = FileSource(path)
    try:
        state: dict[str, torch.Tensor] = {}
        for entry in source.entries.values():
            state.update((name, source.read(name).clone()) for name in entry.members)
            if entry.storage is not None:  # the file's manifest stays behind
                state.update(label(entry.name, entry.storage, entry.shape))
        return state
    finally:
        source.close()


def _pickled(path: Path) -> dict[str, torch.Tensor]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError as error:
        raise FileError(error.errno, error.strerror, str(path)) from None
    except Exception as error:
        raise BadFile(f"stowage: {path}: must be weights that torch.load reads: {error}") from None
    if not isinstance(found, dict):
        raise BadFile(f"stowage: {path}: must hold a state dict, got {type(found).__name__}")
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def source_of(checkpoint: Checkpoint) -> FileSource | DictSource:
    """The tensors of a checkpoint, nothing of them read yet where they are safetensors. Close a
    FileSource after use. All files are opened: one that is missing is an error now."""
    path = _found(Path(checkpoint))
    if path.suffix == ".json":
        index = read_index(path)
        files = sorted(set(index.get("weight_map", index).values()))
        missing = [name for name in files if not (path.parent / name).is_file()]
        if missing:
            raise InvalidArgument(f"stowage: {path}: its files must be there, lacks {missing}")
        if "weight_map" in index and all(name.endswith(".safetensors") for name in files):
            return FileSource(path)
        state: dict[str, torch.Tensor] = {}
        for name in files:
            state.update(load_state_dict(path.parent / name))
        return _named(state, path)
    return FileSource(path) if path.suffix == ".safetensors" else _named(_pickled(path), path)


def _named(state: dict[str, torch.Tensor], path: Path) -> DictSource:
    source = DictSource(state)
    source.where = os.fspath(path)
    return source


def _found(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise InvalidArgument(
            f"stowage: checkpoint must be a file, an index or a folder with one, got {path}"
        )
    for name in (WEIGHTS_NAME, SAFE_WEIGHTS_NAME):
        if (path / name).is_file():
            return path / name
    indices = sorted(path.glob("*.index.json"))
    if len(indices) != 1:
        raise InvalidArgument(
            f"stowage: {path}: must have one of {WEIGHTS_NAME}, {SAFE_WEIGHTS_NAME} and a single "
            f".index.json, has {len(indices)} indices"
        )
    return indices[0]

# SPDX-License-Identifier: Apache-2.0
"""Weights as raw files beside an `index.json`, which accelerate reads
and writes too. `NAME.dat` has the values row by row; the index has dtype and shape of each.

This form is for tensors that are plain. Models go to a folder of our own form (`disk_offload`).
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from stowage._files.sources import FileSource
from stowage._ops.errors import BadFile, FileError, InvalidArgument
from stowage._tensor.stowed import StowedTensor
from stowage.compat.accelerate._writing import link_or_copy, read_index, write_index, write_whole

Index = dict[str, dict[str, Any]]
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
_CODES = ("Params4bit", "Int8Params")  # bitsandbytes: their scales are entries of a state of theirs


def offload_weight(
    weight: Tensor, weight_name: str, offload_folder: str | os.PathLike[str], index: Any = None
) -> Any:
    """Writes a tensor to `offload_folder`/`weight_name`.dat, whole or not at all; returns `index`,
    with an entry for it where it is not None. A "/" in the name makes a folder.

    Raises InvalidArgument for tensors that hold no values of their own and names that lead out of
    the folder, FileError where the disk is full, with the bytes that it lacks."""
    values = _values(weight, weight_name)
    if index is not None:
        index[weight_name] = {"dtype": _name_of(values.dtype), "shape": list(values.shape)}
    octets = values.contiguous().reshape(-1).view(torch.uint8) if values.numel() else None
    # numpy cannot map a file of no bytes, so that an empty tensor has one.
    data = memoryview(cast(Any, octets.numpy())) if octets is not None else b"\0"
    write_whole(_file(offload_folder, weight_name), data)
    return index


def _values(weight: Tensor, name: str) -> Tensor:
    if isinstance(weight, StowedTensor):
        raise InvalidArgument(
            f"stowage: {name} must be a plain tensor, rests as {weight.resting}; write it with "
            "stowage.save(model, folder)"
        )
    if weight.is_meta:
        raise InvalidArgument(f"stowage: {name} must hold values, is on the meta device")
    if type(weight) not in _PLAIN and type(weight).__name__ not in _CODES:
        raise InvalidArgument(
            f"stowage: {name} must be a plain tensor, got {type(weight).__name__}: its values are "
            "not those of its memory"
        )
    return weight.detach().as_subclass(Tensor).cpu()


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _file(folder: str | os.PathLike[str] | None, name: str) -> Path:
    """Where a weight is: always inside the folder, whatever its name is."""
    if folder is None:
        raise InvalidArgument(f"stowage: {name}: save_folder must be given, it is not in memory")
    path = Path(folder, f"{name}.dat")
    if ".." in path.parts[len(Path(folder).parts) :] or Path(name).is_absolute() or "\0" in name:
        raise InvalidArgument(f"stowage: a weight's name must stay in its folder, got {name!r}")
    return path


def load_offloaded_weight(
    weight_file: str | os.PathLike[str], weight_info: Mapping[str, Any]
) -> Tensor:
    """The tensor in a .dat file, a copy. Raises BadFile where the file is shorter or longer than
    dtype and shape say, FileError where it cannot be read."""
    dtype = getattr(torch, str(weight_info["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise BadFile(f"stowage: {weight_file}: dtype must be torch's, got {weight_info['dtype']}")
    shape = tuple(weight_info["shape"])
    wanted = math.prod(shape) * dtype.itemsize
    try:
        data = bytearray(Path(weight_file).read_bytes())
    except OSError as error:
        raise FileError(error.errno, error.strerror, str(weight_file)) from None
    if len(data) != max(wanted, 1) and not (wanted == 0 and len(data) <= dtype.itemsize):
        raise BadFile(
            f"stowage: {weight_file}: must have {wanted} bytes for {_name_of(dtype)} "
            f"{list(shape)}, has {len(data)}"
        )
    if wanted == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)


def save_offload_index(index: Index | None, offload_folder: str | os.PathLike[str]) -> None:
    """Adds entries to the folder's `index.json`, in one step. Entries whose files are gone are left
    out, and an index that was written half is replaced, with a warning."""
    if not index:
        return
    path = Path(offload_folder, "index.json")
    try:
        known = read_index(path) if path.exists() else {}
    except BadFile as error:
        warnings.warn(f"{error}; it is replaced", stacklevel=2)
        known = {}
    kept = {
        name: facts
        for name, facts in known.items()
        if "safetensors_file" in facts or _file(offload_folder, name).exists()
    }
    write_index(path, {**kept, **index})


def offload_state_dict(save_dir: str | os.PathLike[str], state_dict: Mapping[str, Tensor]) -> None:
    """Writes tensors and the index. What is one tensor under several names is one file under
    several names. Everything is checked before the first is written."""
    for name, tensor in state_dict.items():
        _values(tensor[:0] if tensor.dim() else tensor, name)
        _file(save_dir, name)
    Path(save_dir).mkdir(parents=True, exist_ok=True)
    index: Index = {}
    written: dict[Any, str] = {}
    for name, tensor in state_dict.items():
        facts = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        first = written.setdefault(facts, name) if tensor.numel() else name
        if first == name:
            offload_weight(tensor, name, save_dir, index)
        else:
            link_or_copy(_file(save_dir, first), _file(save_dir, name))
            index[name] = dict(index[first])
    save_offload_index(index, save_dir)


class PrefixedDataset(Mapping[str, Any]):
    """The entries of a mapping whose names begin with `prefix`, under the rest of the name."""

    def __init__(self, dataset: Mapping[str, Any], prefix: str) -> None:
        self.dataset, self.prefix = dataset, prefix

    def __getitem__(self, key: str) -> Any:
        return self.dataset[f"{self.prefix}{key}"]

    def __contains__(self, key: object) -> bool:
        return f"{self.prefix}{key}" in self.dataset

    def __iter__(self) -> Iterator[str]:
        return (key[len(self.prefix) :] for key in self.dataset if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class OffloadedWeightsLoader(Mapping[str, Tensor]):
    """Tensors by name: of `state_dict`, then of `save_folder` and its index, or of `index`, whose
    entries may name safetensors files. Each look-up reads; `in` and `len` do not."""

    def __init__(
        self,
        state_dict: Mapping[str, Tensor] | None = None,
        save_folder: str | os.PathLike[str] | None = None,
        index: Mapping[str, Any] | None = None,
        device: Any = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise InvalidArgument(
                "stowage: one of state_dict, save_folder and index must be given, got none"
            )
        self.state_dict = {} if state_dict is None else state_dict
        self.save_folder, self.device = save_folder, device
        if index is None and save_folder is not None:
            index = read_index(Path(save_folder, "index.json"))
        self.index = {} if index is None else index
        self.all_keys = list(dict.fromkeys([*self.state_dict, *self.index]))

    def __getitem__(self, key: str) -> Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        facts = self.index[key]
        file = facts.get("safetensors_file")
        if file is None:
            found = load_offloaded_weight(_file(self.save_folder, key), facts)
        else:
            found = _from_safetensors(file, facts.get("weight_name", key))
            found = found.to(getattr(torch, facts["dtype"])) if "dtype" in facts else found
        return found if self.device is None else found.to(self.device)

    def __contains__(self, key: object) -> bool:
        return key in self.state_dict or key in self.index

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)


def _from_safetensors(file: str, name: str) -> Tensor:
    source = FileSource(file)
    try:
        return source.read(name).clone()
    finally:
        source.close()


def extract_submodules_state_dict(
    state_dict: Mapping[str, Tensor], submodule_names: Iterable[str]
) -> dict[str, Tensor]:
    """The entries of some modules; "a.1" does not take those of "a.10"."""
    return {
        key: value
        for module in submodule_names
        for key, value in state_dict.items()
        if key == module or key.startswith(f"{module}.")
    }

# SPDX-License-Identifier: Apache-2.0
"""`save`, `load`, `state_dict` and `load_state_dict`: models with resting weights as ordinary
safetensors files and as plain tensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

from stowage._errors import InvalidArgument, raise_problems
from stowage._files.building import build
from stowage._files.filling import Filling, Options, Rename
from stowage._files.flat import DISK_NAMES, flatten
from stowage._files.real_values import (
    RealValues,
    check_dtype,
    file_name,
    unsavable,
    without_old_shards,
    write_config,
)
from stowage._files.source import DictSource, FileSource, Source
from stowage._files.writing import buffer_dtypes, declared, ties, write
from stowage._model.casts import is_cast_of_itself
from stowage._model.granularity import Blocks, Granularity, InputCast
from stowage._model.sizes import byte_count
from stowage._model.stowing import Making
from stowage._model.weights import Held, written
from stowage._storage import Storage
from stowage._tiers.engine import Engine, attach, engine_of
from stowage.policy import Policy, Rules
from stowage.skips import Skip
from stowage.tensor import StowedTensor

FILE = "model.safetensors"


def state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers as plain tensors under the names that files use
    (docs/formats.md), tied ones once. They share the model's memory. Any writer of safetensors
    takes them, `save_pretrained(..., state_dict=stowage.state_dict(model))` too."""
    flat: dict[str, torch.Tensor] = {}
    for held in written(model):
        flat.update(_flat_one(held))
    return flat


def load_state_dict(
    model: nn.Module, state: Mapping[str, torch.Tensor], *, strict: bool = True
) -> None:
    """Fills `model` with copies of what `state_dict` of this module or of torch gave, or of both
    mixed. Weights that rest in the state rest in the model; a plain value for a weight that rests
    in the model is quantized to its storage; dtypes are the model's, as in torch. All problems come
    in one error, before any change."""
    options = Options(Making(), strict=strict, keep_dtypes=True)
    _fill(model, DictSource(state), None, options, "load_state_dict")


def save(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 0,
    metadata: Mapping[str, str] | None = None,
    checksums: bool = True,
) -> Path:
    """Writes every parameter and persistent buffer to `folder`/model.safetensors, or with
    `shard_bytes` to several files and an index; returns the path of the file or index. The files
    appear whole or not at all, and replace an earlier save. Configuration and tokenizer files are
    the caller's own: model.config.save_pretrained(folder).

    With `dtype` (f64, f32, bf16, f16) real values are written instead of codes: every floating
    tensor in that dtype, except what the model wants in fp32, under the file names of transformers
    or diffusers and with the model's configuration, so that their `from_pretrained` opens the
    folder. Weights are dequantized one by one: the peak is the largest of them.

    Raises InvalidArgument for tensors that have no values or no place in a safetensors file, and
    FileError (an OSError) when the disk is full or not writable."""
    where = Path(folder)
    where.mkdir(parents=True, exist_ok=True)
    if dtype is not None:
        return _save_values(model, where, dtype, shard_bytes, metadata, checksums)
    raise_problems("stowage.save", _unsavable(model))
    flat = state_dict(model)
    write(
        where / FILE,
        [declared(name, tensor.dtype, tensor.shape) for name, tensor in flat.items()],
        flat.items(),
        weights=[_weight_facts(held) for held in written(model) if _is_declared(model, held)],
        metadata={**(metadata or {}), **ties(model), **buffer_dtypes(model)},
        shard_bytes=shard_bytes,
        checksums=checksums,
    )
    return _written_path(where, FILE)


def _written_path(where: Path, file: str) -> Path:
    index = where / f"{file}.index.json"
    return index if index.exists() else where / file  # the writer leaves only the new one


def _save_values(
    model: nn.Module,
    where: Path,
    dtype: torch.dtype,
    shard_bytes: int,
    metadata: Mapping[str, str] | None,
    checksums: bool,
) -> Path:
    check_dtype(dtype)
    every = written(model)
    raise_problems("stowage.save", unsavable(model, every))
    real, file = RealValues(model, every, dtype), file_name(model)
    write(
        where / file,
        [declared(*facts) for facts in real.names()],
        real,
        metadata=metadata,
        shard_bytes=shard_bytes,
        checksums=checksums,
    )
    without_old_shards(where, file)
    write_config(model, where, dtype)
    return _written_path(where, file)


def _rests(held: Held) -> bool:
    return isinstance(held.tensor, StowedTensor)


def _is_declared(model: nn.Module, held: Held) -> bool:
    """Whether a file says how it rests: not of plain values that rest while the model is
    offloaded."""
    engine = engine_of(model)
    if engine is not None and held.name in engine.made_plain and is_cast_of_itself(held.tensor):
        return False
    return _rests(held)


def _unsavable(model: nn.Module) -> list[str]:
    """Every reason why a tensor of `model` cannot be written."""
    problems, names = [], set()
    for held in written(model):
        tensor = held.tensor
        if tensor.is_meta:
            problems.append(f"{held.name}: must hold values, got a meta tensor")
            continue
        if not _rests(held) and type(tensor) not in (
            torch.Tensor,
            nn.Parameter,
            nn.Buffer,
        ):
            problems.append(
                f"{held.name}: must be an ordinary or a stowed tensor, got {type(tensor).__name__}"
            )
            continue
        for name, part in _flat_one(held).items():
            if part.dtype not in DISK_NAMES:
                problems.append(f"{name}: safetensors must have its dtype, got {part.dtype}")
            if name in names:
                problems.append(f"{name}: must be the name of one tensor, two would have it")
            names.add(name)
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            kind = type(module).__name__
            problems.append(f"{path or kind}: must hold its state in tensors, has extra state")
    return problems


def _flat_one(held: Held) -> dict[str, torch.Tensor]:
    tensor = held.tensor
    if isinstance(tensor, StowedTensor):
        return flatten(held.name, tensor)
    return {held.name: tensor.detach()}


def _weight_facts(held: Held) -> dict[str, object]:
    weight = held.tensor
    assert isinstance(weight, StowedTensor)
    return {
        "name": held.name,
        "storage": weight.storage,
        "shape": list(weight.shape),
        "parts": list(flatten(held.name, weight)),
        "compute": DISK_NAMES[weight.dtype],
    }


def load(
    model: nn.Module | Callable[[], nn.Module],
    folder: str | os.PathLike[str],
    storage: str | Storage | Rules | None = None,
    *,
    rules: Rules | None = None,
    skip: Skip = None,
    allow_unmatched: bool = False,
    compute_dtype: torch.dtype | None = None,
    exact: bool = False,
    keep_nonfinite: bool = False,
    mmap: bool = False,
    strict: bool = True,
    rename: Rename | None = None,
    verify: bool = False,
    measure: bool = True,
    working: str | None = None,
    blocks: Blocks = None,
    input_cast: InputCast = None,
    ram: int | str | None = None,
    reads: str = "automatic",
) -> nn.Module:
    """Fills a model from a file, a shard index or a folder that holds either; returns the model.

    `model` is a module, or a function that builds one: it is called so that parameters take no
    memory (on the meta device) and computed buffers have values. Weights that rest in the file rest
    in the model. With `storage` or `rules` (as in `stow`) plain weights of the file are quantized
    on the way, tensor by tensor from the mapped file. dtypes are the file's unless `compute_dtype`
    is given. Memory beyond the model's own at rest stays below 32 MiB.

    `mmap` leaves resting weights in the mapped file, read-only, instead of copying them. `ram` does
    so too, with plain ones of 64 KiB, and brings them into memory as they are used, at most so many
    bytes ("2GiB") at a time: see `offload`. `rename` gives a weight of the file the model's name
    for it, or None to leave it out. `strict=False` permits missing and unexpected names. `verify`
    compares the file's checksums first. `skip`, `allow_unmatched`, `exact`, `keep_nonfinite`,
    `measure`, `working`, `blocks` and `input_cast` are those of `stow`.

    Raises InvalidArgument that lists everything missing, unexpected, of wrong shape, dtype or
    storage, or not finite; the model is then as it was. BadFile and FileError as from a damaged or
    unreadable file."""
    policy = _policy(storage, rules, skip, allow_unmatched, ram)
    grain = Granularity.parse(working, blocks, input_cast, exact)
    how = Making(compute_dtype, grain.exact, keep_nonfinite, measure)
    options = Options(how, mmap or ram is not None, ram is not None, strict, rename)
    source = FileSource(folder)
    try:
        if verify:
            source.verify()
        engine = None if ram is None else Engine(source, byte_count(ram, "ram"), reads)
        target = model if isinstance(model, nn.Module) else build(model)
        if engine is not None and engine_of(target) is not None:
            raise InvalidArgument("stowage.load: the model must not be offloaded, onload it first")
        filling = _fill(target, source, policy, options, "load", grain)
        if engine is not None:
            engine.expect(filling.order())
            engine.made_plain = filling.casts()
            attach(target, engine)
    finally:
        source.close()
    return target


def _policy(
    storage: str | Storage | Rules | None,
    rules: Rules | None,
    skip: Skip,
    allow_unmatched: bool,
    ram: int | str | None,
) -> Policy | None:
    if storage is None and rules is None:
        if skip is not None:
            raise InvalidArgument("stowage.load: skip must come with storage or rules")
        return None
    if ram is not None:
        raise InvalidArgument(
            "stowage.load: ram must come without storage and rules: what is quantized now is not "
            "in the file (save the model, then load it with ram)"
        )
    policy = Policy.parse(storage, rules, skip, allow_unmatched)
    if policy.several:
        raise InvalidArgument("stowage.load: storage must be one, only stow chooses of several")
    return policy


def _fill(
    model: nn.Module,
    source: Source,
    policy: Policy | None,
    options: Options,
    where: str,
    grain: Granularity | None = None,
) -> Filling:
    with torch.inference_mode(False), torch.no_grad():
        filling = Filling(model, source, policy, options)
        commit = filling.execute()
        source.check()  # before the problems: values that were lost make some of their own
        if grain is not None:
            filling.problems.extend(grain.problems(model, filling.resting()))
        raise_problems(f"stowage.{where}: {source.where}", filling.problems)
        commit()
        if grain is not None:
            grain.apply(model)
    return filling

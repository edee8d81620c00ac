# SPDX-License-Identifier: Apache-2.0
"""`save` and `state_dict`: models with resting weights as ordinary safetensors files and as plain
tensors; weights that are spread over processes are gathered in each first. _tiers/load.py
has the way back."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from stowage._files.names import DISK_NAMES, flatten, label_all
from stowage._files.originals import DIALECTS
from stowage._model.files.configs import replaced
from stowage._model.files.dialect import files_of, write_anew
from stowage._model.files.real_values import (
    RealValues,
    check_dtype,
    config_files,
    described_anew,
    file_name,
    unsavable,
    without_old_shards,
)
from stowage._model.files.template import differences, template_of, write_again
from stowage._model.weights import Held, Inventory
from stowage._model.writer import buffer_dtypes, declared, write
from stowage._ops import _torch, library
from stowage._ops.errors import FileError, InvalidArgument, raise_problems
from stowage._shard.local_shards import holds_matrices, is_spread, values_of
from stowage._shard.own_matrices import like_spread, rows_here
from stowage._tensor.casts import is_plain, plain_values
from stowage._tensor.stowed import StowedTensor

FILE = "model.safetensors"
T = TypeVar("T")


def state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers as plain tensors under the names that files use.

    Any writer of safetensors takes them, `save_pretrained(...,
    state_dict=stowage.state_dict(model))` too (docs/formats.md has the names). Where weights are
    spread over processes, all must call it, and each gets the whole of them.

    Args:
        model: any module.

    Returns:
        Names to tensors, tied ones once. They share the model's memory.

    Example:
        >>> stowage.stow(model, "int8:row")
        >>> sorted(name for name in stowage.state_dict(model) if name.startswith("0."))
        ['0.bias', '0.weight', '0.weight_scale']
    """
    every = gathered(in_rows(model))
    flat = _flat(every)
    rest = ((held.name, held.tensor) for held in every if _is_declared(held))
    label_all(flat, {name: weight for name, weight in rest if isinstance(weight, StowedTensor)})
    return flat


def _flat(every: list[Held]) -> dict[str, torch.Tensor]:
    flat: dict[str, torch.Tensor] = {}
    for held in every:
        flat.update(_flat_one(held))
    return flat


def save(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    dialect: str | None = None,
    requantize: bool = False,
    shard_bytes: int = 0,
    metadata: Mapping[str, str] | None = None,
    checksums: bool = True,
) -> Path:
    """Writes every parameter and persistent buffer to safetensors files.

    The files appear whole or not at all, and replace an earlier save. Where weights rest, the
    config.json of a model of transformers or diffusers is written too, and says so; tokenizer files
    are yours. Where weights are spread over processes (docs/sharding.md), all must call it; the
    first writes.

    Args:
        model: any module.
        folder: gets `model.safetensors`, or several files and an index; it is made if it is not
            there.
        dtype: f64, f32, bf16 or f16: real values are written instead of codes, every floating
            tensor in that dtype, except what the model wants in fp32, under the file names of
            transformers or diffusers and with the model's configuration, so that their
            `from_pretrained` opens the folder. Weights are dequantized one by one: the peak is the
            largest of them.
        dialect: "fp8", "modelopt", ...: a model that was loaded from files of that dialect is
            written as such files again, with the same names, order and bytes, its config.json too,
            but for the weights that were changed, each in the form that it had. Any other model is
            written as files of that dialect, or of one form of it ("gptq:gptq_v2"), if it has the
            storage of every weight that rests (docs/dialects.md).
        requantize: with a dialect: where rows have other scales than one another, and its files
            have one for all, they are quantized again, to one; else that is an error. What was not
            changed may then be rounded once more.
        shard_bytes: the most bytes of a file; 0 is one file.
        metadata: more texts for the header of the file.
        checksums: writes one for each tensor, which `load(verify=True)` compares.

    Returns:
        The path of the file or of the index.

    Raises:
        InvalidArgument: tensors that have no values or no place in a safetensors file; a dialect
            that lacks the storage of a weight, which is named with the dialects that have it.
        FileError: the disk is full or not writable.

    Example:
        >>> stowage.stow(model, "nf4")
        >>> stowage.save(model, "packed").name
        'model.safetensors'
    """
    if requantize and dialect is None:
        raise InvalidArgument("stowage.save: requantize must come with a dialect, got none")
    where = Path(folder)
    where.mkdir(parents=True, exist_ok=True)
    if dialect is not None:
        given = {"dtype": dtype, "shard_bytes": shard_bytes or None, "metadata": metadata}
        return _save_dialect(model, where, dialect, requantize, given)
    if dtype is not None:
        return _save_values(model, where, dtype, shard_bytes, metadata, checksums)
    inventory = in_rows(model)
    every = gathered(inventory)
    raise_problems("stowage.save", _unsavable(model, every))

    def write_files() -> None:
        flat = _flat(every)
        weights = [_weight_facts(held) for held in every if _is_declared(held)]
        said = library.text(library.quantization_config(json.dumps(weights)))
        with described_anew(model, where, json.loads(said) if said else None):
            write(
                where / FILE,
                [declared(name, tensor.dtype, tensor.shape) for name, tensor in flat.items()],
                flat.items(),
                weights=weights,
                metadata={**(metadata or {}), **inventory.ties, **buffer_dtypes(inventory)},
                shard_bytes=shard_bytes,
                checksums=checksums,
            )

    by_the_first(is_spread_out(inventory), write_files)
    return _written_path(where, FILE)


def _save_dialect(
    model: nn.Module, where: Path, dialect: str, requantize: bool, given: Mapping[str, object]
) -> Path:
    for name, value in given.items():
        if value is not None:
            raise InvalidArgument(f"stowage.save: dialect must come without {name}, got both")
    template = template_of(model, dialect)
    inventory = in_rows(model)
    every = gathered(inventory)
    spread = is_spread_out(inventory)
    if template is None:
        if dialect in DIALECTS:
            raise InvalidArgument(
                f"stowage.save: dialect {dialect!r} must come with a model that was loaded from "
                "such files, got one from elsewhere"
            )
        raise_problems("stowage.save", _unsavable(model, every))
        files = files_of(every, dialect)
        by_the_first(spread, lambda: write_anew(model, files, every, where / FILE))
        return _written_path(where, FILE)
    raise_problems("stowage.save", _unheld(model, every) or differences(template, every))
    by_the_first(spread, lambda: write_again(template, every, where, requantize))
    return _written_path(where, template.file)


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
    inventory = in_rows(model)
    every = gathered(inventory)
    raise_problems("stowage.save", unsavable(model, every))
    file = file_name(model)

    def write_files() -> None:
        real = RealValues(model, every, dtype)
        with replaced(where, config_files(model, dtype)):
            write(
                where / file,
                [declared(*facts) for facts in real.names()],
                real,
                metadata=metadata,
                shard_bytes=shard_bytes,
                checksums=checksums,
            )
            without_old_shards(where, file)

    by_the_first(is_spread_out(inventory), write_files)
    return _written_path(where, file)


def _is_declared(held: Held) -> bool:
    """Whether a file says how it rests: not of plain values that rest while the model is
    offloaded."""
    return held.rests and not is_plain(held.tensor)


def _unsavable(model: nn.Module, every: list[Held]) -> list[str]:
    """Every reason why a tensor of `model` cannot be written."""
    problems, names = _unheld(model, every), set()
    for held in every:
        if _not_held(held):
            continue
        for name, part in _flat_one(held).items():
            if part.dtype not in DISK_NAMES:
                problems.append(f"{name}: safetensors must have its dtype, got {part.dtype}")
            if name in names:
                problems.append(f"{name}: must be the name of one tensor, two would have it")
            names.add(name)
    return problems


def _not_held(held: Held) -> str:
    """Why a tensor has no values that a file could hold; "" where it has."""
    tensor = held.tensor
    if tensor.is_meta:
        return f"{held.name}: must hold values, got a meta tensor"
    if not held.rests and type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        kind = type(tensor).__name__
        return f"{held.name}: must be an ordinary or a stowed tensor, got {kind}"
    return ""


def _unheld(model: nn.Module, every: list[Held]) -> list[str]:
    """Every state of `model` that no file can hold, in whatever form."""
    problems = [why for held in every if (why := _not_held(held))]
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            kind = type(module).__name__
            problems.append(f"{path or kind}: must hold its state in tensors, has extra state")
    return problems


def _flat_one(held: Held) -> dict[str, torch.Tensor]:
    tensor = held.tensor
    if not isinstance(tensor, StowedTensor):
        return {held.name: tensor.detach()}
    if is_plain(tensor):
        return {held.name: plain_values(tensor)}
    return flatten(held.name, tensor)


def _weight_facts(held: Held) -> dict[str, object]:
    weight = held.tensor
    assert isinstance(weight, StowedTensor)
    return {
        "name": held.name,
        "storage": weight.resting,
        "shape": list(weight.shape),
        "parts": list(flatten(held.name, weight)),
        "compute": DISK_NAMES[weight.dtype],
    }


def reshard(model: nn.Module) -> None:
    """Lets FSDP2's modules hold their own rows again, as they do between two steps."""
    for module in model.modules():
        if _torch.fsdp_state(module) is not None:
            sharded: Any = module
            sharded.reshard()


def in_rows(model: nn.Module) -> Inventory:
    """Of a model whose modules hold their own rows again."""
    reshard(model)
    return Inventory(model)


def is_spread_out(inventory: Inventory) -> bool:
    """Whether some tensor is spread over processes."""
    return any(is_spread(held.tensor) for held in inventory.every)


def gathered(inventory: Inventory) -> list[Held]:
    """What a file holds of a model, no tensor spread any more, weights of fp8 training as their
    plain values. All processes must call it, and in each of them the whole model rests then."""
    with torch.no_grad():
        return [replace(held, tensor=full(held.tensor)) for held in inventory.written]


def full(tensor: torch.Tensor) -> torch.Tensor:
    spread: Any = tensor
    if holds_matrices(spread):
        spread = like_spread(spread, rows_here(spread), False)
    return values_of(spread.full_tensor() if is_spread(tensor) else tensor)


def by_the_first(spread: bool, write: Callable[[], T]) -> T | None:
    """What `write` gives in process 0, alone; where it fails, it fails in all of them."""
    if not spread:
        return write()
    import torch.distributed as dist

    result, error = None, None
    if dist.get_rank() == 0:
        try:
            result = write()
        except Exception as failed:
            error = failed
    told = [None if error is None else f"{error}"]
    dist.broadcast_object_list(told, src=0)
    if error is not None:
        raise error
    if told[0] is not None:
        raise FileError(f"stowage: process 0 must write the files, and failed: {told[0]}")
    return result

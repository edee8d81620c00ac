# SPDX-License-Identifier: Apache-2.0
"""Models whose resting weights are spread over processes: checks, and checkpoints of
`torch.distributed.checkpoint` that hold plain named tensors. A model is sharded by torch's own
`fully_shard`, and after `prepare` by its DTensor. docs/sharding.md."""

from __future__ import annotations

import json
import os
from typing import Any, cast
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as read_state
from torch.distributed.checkpoint.state_dict_saver import save as write_state
from torch.distributed.tensor import DTensor, Replicate

from stowage._model.files.save import reshard
from stowage._model.files.spread import Wanted, fill_spread, give_memory
from stowage._model.weights import Inventory
from stowage._ops import _torch
from stowage._ops.errors import BadFile, InvalidArgument, raise_problems
from stowage._ops.memory import octets
from stowage._shard.groups import shard_dim
from stowage._shard.local_shards import holds_matrices
from stowage._shard.own_matrices import rows_here
from stowage._shard.pieces import join_columns, own_columns
from stowage._shard.records import decode, geometry
from stowage._shard.replacement import widened
from stowage._shard.reshard_check import reshard_problems
from stowage._shard.rows import RESTING, StowedRows, rows_of
from stowage._tensor.stowed import StowedTensor

MANIFEST = "stowage.manifest"


def check(model: nn.Module) -> None:
    """Checks that `model` can work as it is spread. All processes must call it.

    Args:
        model: a module after `fully_shard` or `parallelize_module`.

    Raises:
        InvalidArgument: the same in each process, where `reshard_after_forward` is an int, where a
            weight that was stowed is spread as plain values, or where one rests in another form,
            shape or with other shared parts than in process 0.

    Example:
        >>> stowage.stow(model, "nf4")
        >>> fully_shard(model, mesh=mesh)
        >>> stowage.sharding.check(model)
    """
    mine = {name: _facts(tensor) for name, tensor in _resting(model).items()}
    problems, every = _problems(model, mine)
    for rank, facts in enumerate(every):
        for name in sorted(every[0].keys() | facts.keys()):
            if (want := every[0].get(name)) != (got := facts.get(name)):
                problems.append(f"{name}: must rest in process {rank} as in 0, {want}, got {got}")
    raise_problems("stowage.sharding.check", problems)


def _problems(model: nn.Module, facts: Any = None) -> tuple[list[str], list[Any]]:
    """Of what travels otherwise than it was stowed, in any process; and the facts of each."""
    reshard(model)
    mine = (reshard_problems(model) + widened(model), facts)
    every: list[Any] = [mine]
    if dist.is_initialized():
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine)
    return sorted({text for texts, _ in every for text in texts}), [facts for _, facts in every]


def _facts(tensor: StowedRows | StowedTensor) -> tuple[Any, ...]:
    rows = _as_rows(tensor)
    whole = rows._whole
    return (whole.storage.name, whole.uncut, whole.dtype, whole.exact, *map(_sum, rows._shared()))


def _sum(part: Tensor) -> int:
    return crc32(memoryview(cast(Any, octets(part).cpu().numpy())))


def _as_rows(tensor: StowedRows | StowedTensor) -> StowedRows:
    """All rows of a weight that is whole here."""
    return tensor if isinstance(tensor, StowedRows) else rows_of(tensor, 0, tensor.shape[0])


def _resting(model: nn.Module) -> dict[str, StowedRows | StowedTensor]:
    """Of weights that rest what is here: rows, or the whole."""
    reshard(model)
    every = {held.name: _here(held.tensor) for held in Inventory(model).written}
    return {n: t for n, t in every.items() if isinstance(t, RESTING)}


def _here(tensor: Tensor) -> Any:
    return rows_here(tensor) if holds_matrices(tensor) else _torch.local_of(tensor)


# --- checkpoints ----------------------------------------------------------------------------------


def state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers as plain tensors and DTensors of plain tensors.

    `torch.distributed.checkpoint` saves them, and loads them with any number of processes. Where a
    weight is spread its tensors are the model's own memory, but for weights whose columns tensor
    parallelism has cut: the records of their whole rows are put together here.

    Args:
        model: a module after `fully_shard` or `parallelize_module`.

    Returns:
        Names to tensors. A resting weight `w` becomes `w.records`, uint8 [rows, length], and one
        tensor for each part that its rows share, such as `w.nested_map`; `stowage.manifest` says in
        JSON what rests how.

    Raises:
        InvalidArgument: a weight that was stowed is spread as plain values.

    Example:
        >>> stowage.stow(model, "nf4")
        >>> fully_shard(model, mesh=mesh)
        >>> stowage.sharding.state_dict(model)["0.weight.records"].shape  # codes and a scale
        torch.Size([64, 36])
    """
    reshard(model)
    raise_problems("stowage.sharding.state_dict", widened(model))
    state = _tensors(model)
    text = json.dumps(_manifest(model, sums=True), sort_keys=True).encode()
    state[MANIFEST] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return state


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for held in Inventory(model).written:
        local = _here(held.tensor)
        if not isinstance(local, RESTING):
            state[held.name] = held.tensor.detach()
            continue
        rows = _as_rows(local)
        state[f"{held.name}.records"] = _records(held.tensor, rows)
        for part, value in zip(rows._whole.shared_names, rows._shared(), strict=True):
            state[f"{held.name}.{part}"] = value
    return state


def _records(tensor: Tensor, rows: StowedRows) -> Tensor:
    if not isinstance(tensor, DTensor):
        return rows._records
    whole, places = rows._whole, list(tensor.placements)
    records, g = rows._records, geometry(whole.storage, whole.uncut)
    if whole.total is not None:
        cut = next(i for i, place in enumerate(places) if shard_dim(place) == 1)
        records = _whole_rows(rows, tensor.device_mesh.get_group(cut))
        places[cut] = Replicate()
    return DTensor.from_local(
        records,
        tensor.device_mesh,
        places,
        run_check=False,
        shape=torch.Size((tensor.shape[0], g.length)),  # of which rows may be of a part alone
        stride=(g.length, 1),
    )


def _whole_rows(rows: StowedRows, group: Any) -> Tensor:
    """The records of the rows that are here, with the columns that others of `group` have."""
    whole, (count, length) = rows._whole, rows._records.shape
    if rows.is_meta:
        return rows._records.new_empty(count, geometry(whole.storage, whole.uncut).length)
    pieces = rows._records.new_empty(dist.get_world_size(group), count, length)
    if count:
        dist.all_gather(list(pieces), rows._records.contiguous(), group=group)
    return join_columns(list(pieces), whole.storage, whole.shape[0], whole.uncut[1])


def _manifest(model: nn.Module, sums: bool = False) -> dict[str, Any]:
    """`sums`: the CRC32 of the parts that rows share, without which records mean something else."""
    facts: dict[str, Any] = {}
    shapes = {held.name: list(held.tensor.shape) for held in Inventory(model).written}
    for name, tensor in _resting(model).items():
        rows = _as_rows(tensor)
        whole, parts = rows._whole, rows._shared()
        compute = str(whole.dtype).removeprefix("torch.")
        facts[name] = {"storage": whole.storage.name, "shape": shapes[name]}
        facts[name]["compute"] = compute
        if sums and parts:
            facts[name]["shared"] = dict(zip(whole.shared_names, map(_sum, parts), strict=True))
    return facts


def save(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Writes `state_dict(model)` with `torch.distributed.checkpoint`. All processes must call it.

    Args:
        model: a module after `fully_shard` or `parallelize_module`.
        folder: of the checkpoint.

    Raises:
        InvalidArgument: the same in each process, where `check` would say of one that it cannot
            work. Processes may hold different models.

    Example:
        >>> stowage.stow(model, "nf4")
        >>> fully_shard(model, mesh=mesh)
        >>> stowage.sharding.save(model, "checkpoint")
    """
    raise_problems("stowage.sharding.save", _problems(model)[0])
    write_state(state_dict(model), checkpoint_id=folder)


def load(model: nn.Module, folder: str | os.PathLike[str], wanted: Wanted) -> None:
    """As `stowage.sharding.load` says without `ram`."""
    reshard(model)
    # What is made here is no matter of whoever calls.
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        if not is_checkpoint(folder):
            fill_spread(model, folder, wanted)
        elif wanted != Wanted():
            raise InvalidArgument(
                f"stowage.sharding.load: rename, strict and keep_nonfinite must come with a file, "
                f"{folder} is a checkpoint of stowage.sharding.save"
            )
        else:
            _load_checkpoint(model, folder)


def _load_checkpoint(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    raise_problems("stowage.sharding.load", widened(model))
    state = _tensors(model)
    _check_checkpoint(model, state, folder)
    if give_memory(model):
        state = _tensors(model)
    read_state(state, checkpoint_id=folder)
    spread = {held.name: held.tensor for held in Inventory(model).written}
    for name, tensor in _resting(model).items():
        if holds_matrices(spread[name]):
            _fill_matrices(_torch.local_of(spread[name]), name, state)
        elif isinstance(tensor, StowedTensor):
            _fill(tensor, name, state)
        elif tensor._whole.total is not None:
            records: Any = state[f"{name}.records"]
            own = own_columns(spread[name], tensor._whole, records.to_local())
            tensor._records.copy_(own)
        elif tensor._origin is not None:
            tensor._origin.written()


def is_checkpoint(folder: str | os.PathLike[str]) -> bool:
    return os.path.exists(os.path.join(folder, ".metadata"))


def _check_checkpoint(
    model: nn.Module, state: dict[str, Tensor], folder: str | os.PathLike[str]
) -> None:
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    if MANIFEST not in saved:
        raise BadFile(f"{folder}: must have {MANIFEST}, which stowage.sharding.save writes")
    text = torch.empty(saved[MANIFEST].size, dtype=torch.uint8)  # type: ignore[union-attr]
    read_state({MANIFEST: text}, checkpoint_id=folder)
    there, here = json.loads(bytes(text.tolist())), _manifest(model)
    problems = []
    for name in sorted(there.keys() | here.keys()):
        got, want = there.get(name, {}), here.get(name, {})
        for fact in ("storage", "shape"):
            if got.get(fact) != want.get(fact):
                must, is_ = want.get(fact, "plain"), got.get(fact, "plain")
                problems.append(f"{name}: {fact} must be {must}, got {is_}")
    for name, tensor in state.items() if not problems else ():
        facts: Any = saved.get(name)
        if facts is None:
            problems.append(f"{name}: must be in the checkpoint, is not")
        elif facts.properties.dtype is not tensor.dtype or facts.size != tensor.shape:
            problems.append(
                f"{name}: must be {tensor.dtype} {list(tensor.shape)}, got "
                f"{facts.properties.dtype} {list(facts.size)}"
            )
    problems = problems or _foreign_parts(there, saved, folder)
    if problems:
        raise BadFile(f"{folder}: nothing was loaded:\n  " + "\n  ".join(problems))


def _foreign_parts(
    there: dict[str, Any], saved: dict[str, Any], folder: str | os.PathLike[str]
) -> list[str]:
    """Parts that are not those that the records were saved with: of another save, for instance."""
    sums = {
        f"{name}.{part}": value
        for name, facts in there.items()
        for part, value in facts.get("shared", {}).items()
    }
    parts = {n: torch.empty(saved[n].size, dtype=saved[n].properties.dtype) for n in sums}
    if parts:
        read_state(dict(parts), checkpoint_id=folder)
    return [
        f"{name}: must be what was saved beside the records of its weight, is not"
        for name, part in parts.items()
        if _sum(part) != sums[name]
    ]


def _fill_matrices(local: StowedTensor, name: str, state: dict[str, Tensor]) -> None:
    """Some matrices of a stack, whose records were copies."""
    records: Any = state[f"{name}.records"]
    _set(local, records.to_local(), name, state)


def _fill(weight: StowedTensor, name: str, state: dict[str, Tensor]) -> None:
    """A weight that is not spread: its records were copies."""
    _set(weight, state[f"{name}.records"], name, state)


def _set(weight: StowedTensor, records: Tensor, name: str, state: dict[str, Tensor]) -> None:
    whole = _as_rows(weight)._whole
    fresh = [torch.empty_like(part) for part in weight._parts()]
    decode(records, whole.storage, whole.shape, fresh)
    for part, own in zip(whole.shared_names, fresh[whole.storage.in_rows :], strict=True):
        own.copy_(state[f"{name}.{part}"])
    made = weight._like(fresh)
    with torch.no_grad():
        weight.copy_(made)

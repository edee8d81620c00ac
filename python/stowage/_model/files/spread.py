# SPDX-License-Identifier: Apache-2.0
"""Fills a model that is spread over processes from a file in any dialect: each process reads the
rows that it has, and of what all rows share the whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stowage._files.names import Entry
from stowage._files.own_rows import OwnRows, rounded_out, rows_together
from stowage._files.renames import Rename
from stowage._files.sources import FileSource
from stowage._model.choice.selection import Selection
from stowage._model.files.adoption import Adopted, adopt
from stowage._model.files.fill import Assignment, Filling, Options, misfit
from stowage._model.files.template import Template, remember_template
from stowage._model.reports.report import remember_formed
from stowage._model.rest.formation import Making
from stowage._model.weights import Choice, Held, Inventory, Swap
from stowage._ops import _torch, library
from stowage._ops.errors import InvalidArgument, StowageError, raise_problems, translated
from stowage._ops.storage import Storage
from stowage._shard.fragments import stand_alone
from stowage._shard.groups import shard_dim
from stowage._shard.pieces import own_columns
from stowage._shard.records import encode, encode_into
from stowage._shard.rows import StowedRows
from stowage._tensor.stowed import VALUE_DTYPES, StowedTensor


class Wanted(NamedTuple):
    """What `stowage.sharding.load` is told beside a file."""

    rename: Rename | None = None
    strict: bool = True
    keep_nonfinite: bool = False


def fill_spread(model: nn.Module, folder: str | os.PathLike[str], wanted: Wanted) -> None:
    """As `stowage.sharding.load` says of a file."""
    where = f"stowage.sharding.load: {folder}"
    with ExitStack() as stack:
        with in_step():
            source = FileSource(folder)
            stack.callback(source.close)
            adopted = adopt(source, model, wanted.rename, wanted.strict)
            filling = Spread(model, source, None, _options(adopted, wanted))
            raise_problems(where, filling.problems)
        with in_step():
            made = filling.filled(wanted.keep_nonfinite)
            source.check()  # before the problems: values that were lost make some of their own
            raise_problems(where, filling.problems)
        give(filling.inventory, made)
        remember_formed(model, *source.formed)
        if adopted.dialect:
            remember_template(model, Template.of(source, filling.taken(), adopted.dialect))


@contextmanager
def in_step() -> Iterator[None]:
    """What the block raises in one process, every other raises too: none goes on alone, to wait for
    the others until they are given up."""
    raised: Exception | None = None
    try:
        yield
    except Exception as error:
        raised = error
    told: list[str | None] = [None if raised is None else str(raised)]
    if dist.is_initialized():
        told = [None] * dist.get_world_size()
        dist.all_gather_object(told, None if raised is None else str(raised))
    if raised is not None:
        raise raised
    if text := next(filter(None, told), None):
        raise InvalidArgument(text)


def check_alike(where: str, has: bool) -> None:
    """What some processes were given and others were not, all refuse."""
    every = [has]
    if dist.is_initialized():
        every = [has] * dist.get_world_size()
        dist.all_gather_object(every, has)
    if any(every) and not all(every):
        without = ", ".join(str(rank) for rank, given in enumerate(every) if not given)
        raise InvalidArgument(f"{where} in every process or in none, not in {without}")


@dataclass(frozen=True)
class _Own:
    """What is here of a tensor [rows, ...]: rows [first, last), and of those some of each other
    dimension."""

    first: int
    last: int
    others: tuple[tuple[int, int, int], ...] = ()  # dimension, first, count

    @staticmethod
    def of(tensor: Tensor) -> _Own:
        rows = tensor.shape[0] if tensor.dim() else 1
        if not isinstance(tensor, DTensor) or not tensor.dim():
            return _Own(0, rows)
        sizes, offsets = _torch.compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        cut = {d for place in tensor.placements if (d := shard_dim(place))}
        others = tuple((dim, offsets[dim], sizes[dim]) for dim in sorted(cut))
        return _Own(offsets[0], offsets[0] + sizes[0], others)

    def of_values(self, values: Tensor) -> Tensor:
        for dim, first, count in self.others:
            values = values.narrow(dim, first, count)
        return values


@dataclass(frozen=True)
class _Reader:
    rows: OwnRows
    keep_nonfinite: bool

    def read(self, tensor: Tensor, entry: Entry, storage: Storage | None) -> None:
        """Into what is here of a tensor."""
        local, own = _torch.local_of(tensor), _Own.of(tensor)
        if storage is None:
            if local.numel():
                local.copy_(own.of_values(self.rows.values(entry, own.first, own.last)))
        elif isinstance(local, StowedTensor):
            parts, *_ = self._parts(entry, storage, own, local.dtype)
            local.copy_(local._like(parts).to(local.device))
        else:
            self._read_rows(tensor, local, own, entry)

    def _read_rows(self, tensor: Tensor, local: StowedRows, own: _Own, entry: Entry) -> None:
        whole, storage = local._whole, local._whole.storage
        parts, start, stop = self._parts(entry, storage, own, local.dtype)
        shape = (stop - start, *whole.uncut[1:])
        if whole.total is None and local.device.type == "cpu":
            encode_into(local._records, parts, storage, shape, own.first - start)
        else:
            records = encode(parts, storage, shape, own.first - start, own.last - start)
            whole_rows = whole.total is None
            local._records.copy_(records if whole_rows else own_columns(tensor, whole, records))
        for shared, part in zip(local._shared(), parts[storage.in_rows :], strict=True):
            shared.copy_(part)
        if local._origin is not None:
            local._origin.written()

    def _parts(
        self, entry: Entry, storage: Storage, own: _Own, compute: torch.dtype
    ) -> tuple[list[Tensor], int, int]:
        """As OwnRows.parts(); of plain values what they come to rest as."""
        if entry.storage is not None:
            return self.rows.parts(entry, own.first, own.last, compute)
        together, count = rows_together(storage, entry.shape), entry.shape[0]
        start, stop = rounded_out(own.first, own.last, together, count)
        values = self.rows.values(entry, start, stop)
        try:
            return library.quantize(values, storage.key, self.keep_nonfinite), start, stop
        except RuntimeError as error:
            raise translated(error) from None


def _options(adopted: Adopted, wanted: Wanted) -> Options:
    return Options(
        Making(),
        strict=wanted.strict,
        rename=adopted.rename,
        then=adopted.then,
        keep_dtypes=True,
    )


class Spread(Filling):
    """The plan of such a load: how the model's weights rest is settled."""

    def __init__(
        self, model: nn.Module, source: FileSource, selection: Selection | None, options: Options
    ) -> None:
        self._rows = OwnRows(source)
        super().__init__(model, source, selection, options)
        for held, name in self._ties:  # one in the file that are two here
            if name in self._entries and self._fits_alone(held, name):
                self._fit(held, self._entries[name], None)

    def _fits_alone(self, held: Held, name: str) -> bool:
        """Whether a tensor takes the entry `name` for itself, and not what it is tied to."""
        return True

    def _to_compare(self, held: Held, entry: Entry) -> list[Tensor]:
        """What is here; another process has the rest."""
        own = _Own.of(held.tensor)
        if entry.storage is None:
            return [self._rows.values(entry, own.first, own.last)]
        return self._rows.parts(entry, own.first, own.last, torch.float32)[0]

    def _decide(self, held: Held, entry: Entry, choice: Choice | None) -> None:
        local = _torch.local_of(held.tensor)
        rests = _storage_of(local)
        if entry.storage is not None and entry.storage is not rests:
            problem = f"must rest as {rests or 'nothing, plain'}, the file has {entry.storage}"
            problem += " (stowage.load(..., device='meta') makes what rests as in the file)"
        elif entry.storage is not None:
            problem = ""
        elif rests is None:
            problem = misfit(entry, held.tensor.dtype)
        else:
            problem = _not_by_rows(entry, rests)
        if problem:
            self.problems.append(f"{held.name}: {problem}")
            return
        self._steps.append(Assignment(held, entry, rests, "as it rested"))

    def filled(self, keep_nonfinite: bool) -> dict[int, Tensor]:
        """Reads what is here of each tensor into it; of those on the meta device, into new ones,
        which are given by the ids of the old. Values that cannot rest add to `problems`."""
        memory = _memory_of(self.inventory.model)
        reader, steps = _Reader(self._rows, keep_nonfinite), self._by_rows()
        # All first: what is read meanwhile lies behind them and goes, and leaves no holes.
        held = [step.held.tensor for step in steps]
        made = [memory(tensor) if tensor.is_meta else tensor for tensor in held]
        for step, tensor in zip(steps, made, strict=True):
            try:
                reader.read(tensor.detach(), step.entry, step.storage)
            except StowageError as error:
                self.problems.append(f"{step.held.name}: {error}")
        return {id(old): new for old, new in zip(held, made, strict=True) if old is not new}

    def _by_rows(self) -> list[Assignment]:
        """What `filled` reads."""
        return self._steps


def _storage_of(local: Any) -> Storage | None:
    if isinstance(local, StowedRows):
        return local._whole.storage
    return local._storage if isinstance(local, StowedTensor) else None


def _not_by_rows(entry: Entry, storage: Storage) -> str:
    """Why plain values of a file cannot come to rest by rows alone; "" if they can."""
    if entry.dtype not in VALUE_DTYPES:
        return f"must be f64, f32, bf16 or f16 values, the file has {entry.dtype}"
    if stand_alone(storage, entry.shape):
        return ""
    return (
        f"must rest in the file: what {storage} {list(entry.shape)} has of some rows depends on "
        "values of others; `stowage pack` writes such a file"
    )


def _memory_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """What gives a tensor on the meta device memory, where its mesh is or FSDP2 wants it."""
    states = (_torch.fsdp_state(module) for module in model.modules())
    params = (held for s in states for group in _torch.fsdp_groups(s) for held in group.fsdp_params)
    at_home = {id(held.sharded_param) for held in params if held.offload_to_cpu}
    meshes = (t.device_mesh.device_type for t in model.parameters() if isinstance(t, DTensor))
    usual = next(meshes, "cpu")

    def make(tensor: Tensor) -> Tensor:
        device = tensor.device_mesh.device_type if isinstance(tensor, DTensor) else usual
        if id(tensor) in at_home:
            device = "cpu"
        if isinstance(tensor, StowedTensor):
            return tensor._like([torch.empty_like(part, device=device) for part in tensor._parts()])
        made = torch.empty_like(tensor, device=device)
        if isinstance(rows := _torch.local_of(made), StowedRows):
            rows._place.first = _Own.of(made).first  # a scatter on the meta device tells nobody
        return made

    return make


def give_memory(model: nn.Module) -> bool:
    """To all that is on the meta device; whether there was any."""
    inventory, memory = Inventory(model), _memory_of(model)
    bare = [held.tensor for held in inventory.every if held.tensor.is_meta]
    give(inventory, {id(tensor): memory(tensor) for tensor in bare})
    return bool(bare)


def give(inventory: Inventory, made: dict[int, Tensor]) -> None:
    """Puts new tensors into the places of those with these ids: those that are spread as
    `module.to` does, which FSDP2 follows, and others into all of their places."""
    swap, are_spread = Swap(), False
    for held in inventory.every:
        old, new = held.tensor, made.get(id(held.tensor))
        if new is None or isinstance(old, DTensor):
            are_spread |= new is not None
            continue
        is_parameter = isinstance(old, nn.Parameter)
        swap.put(held, nn.Parameter(new, old.requires_grad) if is_parameter else new)
    swap.commit()
    if are_spread:
        inventory.model._apply(lambda tensor: made.get(id(tensor), tensor))

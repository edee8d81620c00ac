# SPDX-License-Identifier: Apache-2.0
"""`offload` and `onload`: the weights of a model go to a folder, which is written first or compared
with the model, and come back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from stowage._files.names import FLOAT8, Entry
from stowage._files.sources import FileSource, is_aligned
from stowage._model.files.save import FILE, save
from stowage._model.reports.report import remember, report
from stowage._model.reports.table import Report
from stowage._model.sizes import memory
from stowage._model.weights import Held, Inventory, Swap, worth_offloading
from stowage._ops._torch import local_of
from stowage._ops.errors import InvalidArgument, raise_problems
from stowage._ops.memory import new_copy, octets
from stowage._ops.storage import Storage
from stowage._shard.local_shards import is_spread
from stowage._shard.own_matrices import like_spread
from stowage._tensor.casts import (
    cast_storage,
    is_plain,
    plain_values,
    stands_for_plain,
)
from stowage._tensor.stowed import StowedTensor
from stowage._tiers.device.placement import (
    Devices,
    attach_devices,
    detach_devices,
    devices_of,
)
from stowage._tiers.disk.engine import (
    WORKERS,
    Engine,
    EngineOptions,
    attach,
    detach,
    engine_of,
    suited,
)
from stowage._tiers.maps.named import Folder, Given, Mapped, Size, by_name
from stowage._tiers.places import CPU, DeviceMap, Places, device_of_name
from stowage._tiers.plans.execution import (
    Planned,
    carried,
    check_alone,
    forget_plan,
    keep_to,
    read_plan,
)
from stowage._tiers.request import Asked, given_bytes


def offload(
    model: nn.Module,
    *,
    ram: int | str | None = None,
    folder: Folder | None = None,
    plan: Planned | None = None,
    device: str | torch.device | None = None,
    accelerator: Size | Mapping[str, Size] | None = None,
    pin: int | str = 0,
    device_map: DeviceMap | str | None = None,
    reads: str = "automatic",
    workers: int = WORKERS,
    timeout: float | None = None,
    lock: bool = False,
    route_ahead: bool = False,
) -> Report:
    """Leaves the weights of `model` where they take little room, and fetches them for each use.

    With `folder` they move there, and at most `ram` bytes of them are in memory at a time; they are
    prefetched in the order that is learnt from use. With an accelerator as `device` the model
    computes there, with at most `accelerator` bytes of weights on it; without a folder they then
    rest in memory. With `plan` weights rest and work as it says.

    Weights stay in the module: they say `cpu`, can be read, saved, copied and written anywhere, and
    no forward is changed. Resting weights go with their scales; plain floating parameters of 2 to 5
    dimensions and 64 KiB go too, as casts of themselves (`onload` makes them plain again); all else
    stays in memory, or goes to the device for good. Files are never changed: a weight that is
    written to leaves them and stays in memory.

    Args:
        model: any module that is not offloaded yet.
        ram: bytes of weights in memory at a time (an int, or "2GiB"); without a folder a limit that
            is checked.
        folder: where weights go. One that is new or empty is written once, in the form of
            `stowage.save`; one that holds exactly these weights is used as it is. A plan leaves
            there what it says is on a disk.
        plan: of `stowage.plan`, or the path of one.
        device: where the model computes ("cuda:0").
        accelerator: bytes of weights on the device, or a mapping of devices to bytes.
        pin: bytes of weights in memory to be pinned for faster copies.
        device_map: a place for modules or parameters by name, as accelerate has it: "cpu" (they
            stay as they are, beside the budget; "ram" says the same), "disk" (as all that it does
            not name) or, for modules, a device for good. Or "auto" (plans within `ram` and
            `accelerator`), "sequential" (fills the accelerators, else `ram`, with the first
            modules), "balanced" (equal shares) or "balanced_low_0" (of all but accelerator 0).
        reads: "mapped" computes straight from the page cache, "direct" reads past it, "buffered"
            through it, "automatic" chooses by what is cached.
        workers: threads that prefetch.
        timeout: seconds that a use waits for bytes at most.
        lock: keeps the budget's memory from being swapped.
        route_ahead: asks the router of a mixture's next layer about the input of this one, and
            prefetches the experts that it picks too; on the CPU, not in training, nor for many
            tokens.

    Returns:
        Where each weight rests now.

    Raises:
        InvalidArgument: the model is offloaded already, a budget is below its largest weight, a
            plan is for another model or machine, arguments contradict each other, a device is not
            there, a map has unknown or overlapping names or two places for a tie, or the folder
            holds anything else. Model and folder are then as they were.
        FileError: the disk is full.
        OutOfMemory: the device is full.

    Example:
        >>> stowage.stow(model, "int8")
        >>> report = stowage.offload(model, ram="64KiB", folder="weights")
        >>> report["0.weight"].tier, model(x).shape
        ('disk', torch.Size([2, 64]))
    """
    if is_offloaded(model):
        raise InvalidArgument("stowage.offload: the model must not be offloaded, onload it first")
    room = given_bytes(ram, "ram") or 0
    options = EngineOptions(room, reads, workers, timeout, lock, route_ahead)
    given = Given(plan, folder, ram, device, accelerator, device_map)
    inventory = Inventory(model)
    how, options = _decided(inventory, given, options)
    device = "cpu" if how.device is None else how.device
    asked = Asked(how.ram, how.folder, device, how.accelerator, pin, options)
    _move_out(inventory, asked, how.device_map)
    keep_to(model, how.plan)
    return report(model)


def _decided(
    inventory: Inventory, given: Given, options: EngineOptions
) -> tuple[Mapped, EngineOptions]:
    """What a map by name and a plan leave to be said."""
    plan, device_map = given.plan, given.device_map
    check_alone("stowage.offload", plan, given._replace(plan=None, folder=None)._asdict())
    if isinstance(device_map, str):
        mapped = by_name(inventory, given)
        if mapped.plan is None:
            return mapped, replace(options, ram=given_bytes(mapped.ram, "ram") or 0)
        plan = mapped.plan
    elif plan is None:
        return Mapped(None, *given[1:5], device_map), options
    plan = read_plan(plan)
    how = carried("stowage.offload", plan, inventory)
    return Mapped(plan, *how.offload_arguments(given.folder)), how.options(options)


def _move_out(inventory: Inventory, asked: Asked, device_map: DeviceMap | None) -> None:
    device, folder, every = asked.device, asked.folder, inventory.every
    places = Places(inventory, device_map, device_of_name(device) or CPU, folder is not None)
    problems = asked.problems(every, places)
    if folder is not None and (spread := [h.name for h in every if is_spread(h.tensor)]):
        problems.append(
            f"{spread[0]}: must be whole to go to a folder, is spread over processes; "
            "stowage.sharding.load(model, checkpoint, ram=) leaves it in the file of a model"
        )
    ring, wrong = (0, []) if problems else asked.ring(every, places)
    raise_problems("stowage.offload", problems + wrong)  # before anything is written
    with torch.inference_mode(False), torch.no_grad():
        devices = Devices(places, ring) if places.all_devices() else None
        _rest(inventory, None if folder is None else Path(folder), places, devices, asked)


def is_offloaded(model: nn.Module) -> bool:
    return engine_of(model) is not None or devices_of(model) is not None


def _rest(
    inventory: Inventory,
    folder: Path | None,
    places: Places,
    devices: Devices | None,
    asked: Asked,
) -> None:
    """Everything goes to its place, or is as it was."""
    model = inventory.model
    with nullcontext(None) if folder is None else _filled(model, folder) as where:
        if where is None:
            _rest_in_ram(inventory, places)
        else:
            _rest_on_disk(inventory, where, places, asked.options)
        if devices is not None:
            try:
                attach_devices(Inventory(model), devices, places, asked.pin_bytes)
            except BaseException:
                _come_back(model)
                raise


def _rest_in_ram(inventory: Inventory, places: Places) -> None:
    """Plain parameters that are fetched to a device rest as casts of themselves."""
    _move(
        [
            Move(held, [held.tensor.detach()], cast_storage(held.tensor.dtype))
            for held in inventory.every
            if not held.rests and places.fetches(held)
        ]
    )


def _rest_on_disk(
    inventory: Inventory, where: Path, places: Places, options: EngineOptions
) -> None:
    source = FileSource(where)
    try:
        moves, problems = compare(inventory, source, places)
        raise_problems(f"stowage.offload: {where}", problems)
        moved = {move.held.name: move.held for move in moves}
        engine = Engine(source, suited(options, source, moved))
        engine.expect(move.held.name for move in moves)
        _move(moves)
        attach(inventory.model, engine, [move.held for move in moves])
    finally:
        source.close()


@contextmanager
def _filled(model: nn.Module, where: Path) -> Iterator[Path]:
    """The folder with a model in it. One that is empty or missing gets this one, and is as it was
    where the block raises."""
    if where.exists() and any(where.iterdir()):
        if not (where / FILE).exists() and not (where / f"{FILE}.index.json").exists():
            raise InvalidArgument(
                f"stowage.offload: {where}: must be empty or hold a model, has other files"
            )
        yield where
        return
    missing = [folder for folder in (where, *where.parents) if not folder.exists()]
    try:
        save(model, where)
        yield where
    except BaseException:
        (where / FILE).unlink(missing_ok=True)
        for folder in missing:
            if folder.exists():
                folder.rmdir()
        raise


def _move(moves: list[Move]) -> None:
    swap = Swap()
    for move in moves:
        old = move.held.tensor
        if move.storage is not None:
            weight = StowedTensor(move.parts, move.storage, old.shape, old.dtype, exact=True)
            parameter = nn.Parameter(weight, requires_grad=old.requires_grad)
            swap.put(move.held, stands_for_plain(parameter))
    swap.commit()
    for move in moves:
        if move.storage is None:
            assert isinstance(move.held.tensor, StowedTensor)
            for mine, mapped in zip(move.held.tensor._parts(), move.parts, strict=True):
                mine.data = mapped
        else:
            remember(move.held, move.held.tensor, "offloaded")


def onload(model: nn.Module) -> Report:
    """Undoes `offload`: every weight is in memory again, plain parameters are plain again.

    Args:
        model: a module that is offloaded; its file is let go.

    Returns:
        Where each weight rests now.

    Raises:
        InvalidArgument: the model is not offloaded.

    Example:
        >>> stowage.offload(model, ram="64KiB", folder="weights")
        >>> stowage.onload(model)["0.weight"].tier
        'ram'
    """
    if not is_offloaded(model):
        raise InvalidArgument("stowage.onload: the model must be offloaded, got one that is not")
    with torch.no_grad():
        forget_plan(model)
        if devices_of(model) is not None:
            detach_devices(model)
        _come_back(model)
    return report(model)


def _come_back(model: nn.Module) -> None:
    """What rests on a disk, or as a cast of itself, is as it was."""
    swap = Swap()
    for held in Inventory(model).every:
        weight = local_of(held.tensor)
        if not isinstance(weight, StowedTensor):
            continue
        for part in weight._parts():
            if not part.untyped_storage().resizable():
                part.data = new_copy(part)
        if is_plain(weight):
            values, tracked = plain_values(weight), held.tensor.requires_grad
            if weight is held.tensor:
                swap.put(held, nn.Parameter(values, tracked))
            else:
                swap.put(held, like_spread(held.tensor, values, tracked))
    swap.commit()
    if engine_of(model) is not None:
        detach(model)


@dataclass(frozen=True)
class Move:
    """A weight, and its parts as the file has them."""

    held: Held
    parts: list[torch.Tensor]
    storage: Storage | None  # of a plain parameter that will rest as a cast of itself


def compare(
    inventory: Inventory, source: FileSource, places: Places
) -> tuple[list[Move], list[str]]:
    """What moves, and every difference between the model and the file."""
    moves: list[Move] = []
    problems: list[str] = []
    names: set[str] = set()
    for held in inventory.written:
        names.update(held.names)
        entry, tensor = source.entries.get(held.name), held.tensor
        storage, dtype = _form(tensor)
        if entry is None:
            problems.append(f"{held.name}: must be in the file, is missing")
            continue
        mine = (tuple(tensor.shape), storage, dtype)
        if mine != (entry.shape, entry.storage, entry.dtype) and not _same_codes(tensor, entry):
            problems.append(
                f"{held.name}: must be {_kind(*mine)} as in the model, the file has "
                f"{_kind(entry.shape, entry.storage, entry.dtype)}"
            )
            continue
        parts = (
            source.parts(entry, tensor.dtype) if entry.storage else [source.read(entry.parts[0])]
        )
        pairs = zip(memory(tensor), parts, strict=True)
        if not all(torch.equal(octets(a), octets(b)) for a, b in pairs):
            problems.append(f"{held.name}: must have the model's values, the file has others")
        source.drop(entry)
        if places.stays(held):
            continue
        if isinstance(tensor, StowedTensor) and all(is_aligned(part) for part in parts):
            moves.append(Move(held, parts, None))
        elif not isinstance(tensor, StowedTensor) and worth_offloading(held, tensor.dtype):
            moves.append(Move(held, parts, cast_storage(tensor.dtype)))
    problems += [
        f"{name}: must be in the model, is only in the file"
        for name in sorted(source.entries.keys() - names)
    ]
    return moves, problems


def _form(tensor: torch.Tensor) -> tuple[Storage | None, torch.dtype | None]:
    """What a file should have: a storage, or plain values of a dtype, which a cast that stands for
    a plain parameter is too."""
    if not isinstance(tensor, StowedTensor):
        return None, tensor.dtype
    return (None, tensor._parts()[0].dtype) if is_plain(tensor) else (tensor._storage, None)


def _same_codes(tensor: torch.Tensor, entry: Entry) -> bool:
    """Whether both are float8 without a scale: codes to a file, values to a model of its own."""
    if isinstance(tensor, StowedTensor) or entry.storage is None:
        return False
    return entry.storage.name == FLOAT8.get(tensor.dtype) and entry.shape == tuple(tensor.shape)


def _kind(shape: tuple[int, ...], storage: Storage | None, dtype: torch.dtype | None) -> str:
    return f"{list(shape)} {storage.name if storage else dtype}"

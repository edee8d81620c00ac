# SPDX-License-Identifier: Apache-2.0
"""`report`: what rests where, in what form, how many bytes it takes and how far it is from the
values it was made from."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import nn

from stowage._model.reports.table import Report, Row
from stowage._model.rest.formation import Loss
from stowage._model.rest.granularity import block_paths, mode_of
from stowage._model.rest.masters import state_of
from stowage._model.sizes import Seen, memory, new_bytes
from stowage._model.stamps import stamp
from stowage._model.weights import Held, Inventory
from stowage._ops import _torch
from stowage._shard.local_shards import piece_of, wire_dtypes
from stowage._shard.rows import RESTING, rests
from stowage._tensor.operators import fallbacks
from stowage._tensor.stowed import StowedTensor

_MEMORIES = "_stowage_memories"  # attribute of a module: its parameter's name -> _Memory
_FORMED = "_stowage_formed"  # of the model that was loaded: bytes and seconds


@dataclass(frozen=True)
class _Memory:
    """What `stow` and `load` know of a parameter and cannot be read off it."""

    reason: str
    loss: Loss | None
    stamp: tuple[int, ...] | None  # of the codes that `loss` is about; None for a plain parameter
    earlier: _Memory | None = None  # of other codes, which may come back


_Memory.__module__ = "stowage._model.report"  # pickles name it


def report(model: nn.Module) -> Report:
    """Describes every parameter of `model`, and its buffers that rest, as they are now. Changes
    nothing."""
    seen: Seen = set()
    inventory = Inventory(model)
    blocks, dtypes = block_paths(inventory), wire_dtypes(model)
    rows = [_row(held, seen, blocks, dtypes) for held in inventory.parameters]
    plain_buffers = []
    for held in inventory.buffers:
        if isinstance(held.tensor, StowedTensor) or _recall(held)[0]:
            rows.append(_row(held, seen, blocks, dtypes))
        else:
            plain_buffers.append(held.tensor)
    buffer_bytes = sum(_rest_bytes(tensor, seen) for tensor in plain_buffers)
    formed, seconds = model.__dict__.get(_FORMED, (0, 0.0))
    return Report(
        tuple(rows),
        buffer_bytes,
        fallbacks(),
        type(model).__name__,
        formed_bytes=formed,
        forming=seconds,
    )


def remember_formed(model: nn.Module, size: int, seconds: float) -> None:
    """So many bytes were put in order while the model was loaded."""
    model.__dict__[_FORMED] = (size, seconds)


def _row(held: Held, seen: Seen, blocks: list[str], dtypes: dict[int, torch.dtype]) -> Row:
    tensor, piece = held.tensor, piece_of(held.tensor, dtypes)
    here = _rest_bytes(tensor, seen)
    storage = piece.local.resting if isinstance(piece.local, RESTING) else None
    reason, loss = _recall(held)
    master, master_bytes = state_of(held)
    return Row(
        name=held.name,
        also=held.names[1:],
        shape=tuple(tensor.shape),
        storage=storage,
        compute=str(tensor.dtype).removeprefix("torch."),
        tier=_tier(tensor),
        shard=piece.rows,
        wire=piece.wire,
        logical_bytes=tensor.numel() * tensor.dtype.itemsize,
        rest_bytes=here,
        whole_bytes=here if piece.whole_bytes is None else piece.whole_bytes,
        reason=reason,
        master=master,
        master_bytes=master_bytes,
        working=mode_of(held, blocks),
        **({} if loss is None else dataclasses.asdict(loss)),
    )


def _rest_bytes(tensor: torch.Tensor, seen: Seen) -> int:
    return 0 if tensor.is_meta else new_bytes(memory(tensor), seen)


def _tier(tensor: torch.Tensor) -> str:
    if tensor.is_meta:
        return "none"
    if tensor.device.type != "cpu":
        return "accelerator"
    local = _torch.local_of(tensor)
    if isinstance(local, StowedTensor):
        memory = local.parts["codes"].untyped_storage()
        if not (memory.resizable() or memory.is_shared()):
            return "disk"  # borrowed: mapped from a file, paged in on use
    return "ram"


def remember(
    held: Held,
    weight: torch.Tensor,
    reason: str,
    loss: Loss | None = None,
    *,
    temporary: bool = False,
) -> None:
    """Keeps, with the modules that hold it, why a parameter is as it is, and its error. A
    `temporary` memory is of codes that will go again: what was known of those before stays."""
    made = None
    if isinstance(_torch.local_of(weight), StowedTensor):
        made = () if loss is None else stamp(memory(weight))
    for site in held.sites:
        known = site.module.__dict__.setdefault(_MEMORIES, {})
        earlier = known.get(site.attribute) if temporary else None
        if earlier is not None and earlier.earlier is not None:
            earlier = earlier.earlier  # of two temporary ones, the first is out of date
        known[site.attribute] = _Memory(reason, loss, made, earlier)


def _recall(held: Held) -> tuple[str, Loss | None]:
    site, resting = held.sites[0], rests(held.tensor)
    known: _Memory | None = site.module.__dict__.get(_MEMORIES, {}).get(site.attribute)
    if known is None or (known.stamp is not None) != resting:
        return "", None
    if not isinstance(held.tensor, StowedTensor) or known.loss is None:
        return known.reason, None
    now = stamp(memory(held.tensor))
    if known.earlier is not None and known.stamp != now:
        known = known.earlier
    # A weight that was written since has an error that nobody measured.
    return known.reason, known.loss if known.stamp == now else None


def loss_of(held: Held) -> Loss | None:
    """The error of a resting weight, if it was measured on these very codes."""
    return _recall(held)[1]

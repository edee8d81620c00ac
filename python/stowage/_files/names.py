# SPDX-License-Identifier: Apache-2.0
"""Resting weights as the plain tensors that files hold, and back. What tensors are called, and what
names, types and shapes mean, the core says, for files and states alike: docs/formats.md."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from stowage._files.row_cuts import RowCut
from stowage._files.stacks import StackPlace
from stowage._ops import library
from stowage._ops.errors import BadFile, translated
from stowage._ops.storage import Storage
from stowage._tensor.casts import cast_storage, is_cast_of_itself, is_plain
from stowage._tensor.stowed import StowedTensor

DISK_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
DISK_NAMES = {dtype: name for name, dtype in DISK_DTYPES.items()}

WHOLE, ROUNDED = 0, 1  # forms of parts: the tensor as it lies, its numbers rounded; others are keys

FLOAT8 = {torch.float8_e4m3fn: "f8_e4m3", torch.float8_e5m2: "f8_e5m2"}
_SHORT = 65536  # bytes: of such tensors the rule may ask for the content
_MOST_DIMENSIONS = 8  # of a tensor in a file

Read = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class Entry:
    """One weight or tensor of a file or a state, under the name that a model gives it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None  # of a plain tensor; None: a type that torch does not have
    storage: Storage | None = None  # None: plain
    compute: torch.dtype | None = None  # where the file says it
    parts: tuple[str, ...] = ()  # its tensors in the order of the layout, or the plain one
    beside: tuple[str, ...] = ()  # further ones, which only tell what it is
    nested_offset: float = 0.0
    forms: tuple[int, ...] = ()  # of its parts, where some are not the tensors as they lie
    heads: int = 0  # of so many, each: the file has its rows in pairs, one from either half
    more: float = 0.0  # the values in the file are so much more
    scaled_by: str = ""  # of 8-bit codes: the tensor that scales them in a way that we do not know
    place: StackPlace | None = None  # in a stack of the model
    pieces: tuple[Entry, ...] = ()  # of such a stack, which the file has in pieces: those
    cut: RowCut | None = None  # of a tensor of the file, whose members it has

    def is_formed(self, part: int) -> bool:
        """Whether a part is made of its tensor, and does not lie in the file as it is."""
        return bool(self.forms) and self.forms[part] != WHOLE

    @property
    def is_converted(self) -> bool:
        """Whether a model has other values than the file, or has them in another order."""
        moved = self.cut is not None and not self.cut.is_view
        return self.heads != 0 or self.more != 0 or self.pieces != () or moved

    @property
    def resting(self) -> Storage:
        """As what it rests without a change: plain values as a cast of themselves."""
        if self.storage is not None:
            return self.storage
        assert self.dtype is not None
        return cast_storage(self.dtype)

    def by_index(self) -> list[list[Entry]]:
        """Of a stack in pieces those of each index of dim 0, the upper ones first."""
        found: list[list[Entry]] = [[] for _ in range(self.shape[0])]
        for piece in sorted(self.pieces, key=lambda piece: piece.place.first if piece.place else 0):
            assert piece.place is not None
            found[piece.place.index].append(piece)
        return found

    @property
    def lies_whole(self) -> bool:
        """Whether a model has of a tensor, or of a weight's, all bytes as they lie in the file."""
        moved = self.is_converted or self.cut is not None or self.place is not None
        return not moved and not any(self.forms)

    @property
    def gives_indices(self) -> bool:
        """Whether each index of dim 0 has bytes of its own, where these lie in the file."""
        if not self.lies_whole:
            return False
        return self.storage is None or self.storage.gives_indices(self.shape)

    @property
    def whole(self) -> Entry:
        """The entry of all its rows, as the file has them."""
        if self.cut is None:
            return self
        return replace(self, name=self.cut.whole, shape=self.cut.shape, cut=None)

    def own_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Of a plain tensor of the file."""
        return values if self.cut is None else self.cut.values(values)

    @property
    def in_model(self) -> tuple[Storage | None, tuple[int, ...]]:
        """How it rests in a model, and in which shape: as the stack that it is a piece of."""
        if self.place is not None:
            return self.place.storage, self.place.shape
        return self.storage, self.shape

    def as_in_model(self, tensor: torch.Tensor) -> torch.Tensor:
        """A part, or the plain values, from what the file has."""
        if self.heads:
            pairs = tensor.reshape(self.heads, -1, 2, *tensor.shape[1:])
            tensor = pairs.transpose(1, 2).reshape(tensor.shape)
        return (tensor.float() - self.more).to(tensor.dtype) if self.more else tensor

    def as_in_file(self, tensor: torch.Tensor) -> torch.Tensor:
        """The way back, in float32 where values change."""
        if self.heads:
            halves = tensor.reshape(self.heads, 2, -1, *tensor.shape[1:])
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        return tensor.float() + self.more if self.more else tensor

    @property
    def members(self) -> tuple[str, ...]:
        """The names of all its tensors, the codes first."""
        return tuple(dict.fromkeys(self.parts + self.beside))


def in_stacks(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Of entries by a model's names: those that have a place in a stack as one, which is it."""
    found = {name: entry for name, entry in entries.items() if entry.place is None}
    stacks: dict[str, list[Entry]] = {}
    for entry in entries.values():
        if entry.place is not None:
            stacks.setdefault(entry.place.stack, []).append(entry)
    for name, pieces in stacks.items():
        first = pieces[0]
        storage, shape = first.in_model
        members = tuple(member for piece in pieces for member in piece.members)
        found[name] = Entry(
            name, shape, first.dtype, storage, first.compute, beside=members, pieces=tuple(pieces)
        )
    return found


def flatten(name: str, weight: StowedTensor) -> dict[str, torch.Tensor]:
    """The tensors that `weight` becomes in a file. They share its memory."""
    storage, parts = weight._storage, list(weight.parts.values())
    offset = float(weight.parts.get("nested_offset", 0.0))
    compute = DISK_NAMES[weight.dtype]
    try:
        described = library.storage_on_disk(name, storage.key, list(weight.shape), compute, offset)
    except RuntimeError as error:
        raise translated(error) from None
    flat: dict[str, torch.Tensor] = {}
    for tensor in json.loads(library.text(described)):
        if "part" in tensor:
            made = parts[tensor["part"]].detach().view(DISK_DTYPES[tensor["dtype"]])
        elif "text" in tensor:
            made = _text(tensor["text"])
        else:
            made = torch.tensor(tensor["values"], dtype=DISK_DTYPES[tensor["dtype"]])
        flat[tensor["name"]] = made
    return flat


def _text(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def label(
    name: str, storage: Storage, shape: Iterable[int], always: bool = False
) -> dict[str, torch.Tensor]:
    """The tensor that says what the others of a weight do not tell by themselves; empty where they
    tell all."""
    made = json.loads(library.text(library.storage_label(name, storage.key, list(shape))))
    return {made["name"]: _text(made["text"])} if always or made["needed"] else {}


def label_all(flat: dict[str, torch.Tensor], weights: Mapping[str, StowedTensor]) -> None:
    """Adds labels to the tensors that `weights` became, for readers that have no manifest."""
    for name, weight in weights.items():
        flat.update(label(name, weight._storage, weight.shape))
    modules = {_module(name) for name, weight in weights.items() if weight._storage.byte_codes}
    near = {n: t for n, t in flat.items() if {_module(n), _module(_module(n))} & modules}
    for name in _describe(near, "the state")["unreadable"]:  # for what stands beside them
        if name in weights:
            flat.update(label(name, weights[name]._storage, weights[name].shape, always=True))


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def unflatten(
    entry: Entry, read: Read, formed: Callable[[int], torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """The parts of a weight in the order of its layout, reading its tensors by name. They share
    the memory of what `read` gives, where its type is the layout's. `formed` gives the bytes of a
    part that has another form than its tensor."""
    assert entry.storage is not None
    parts = []
    layout = entry.storage.layout(entry.shape)
    for i, (member, (part, dtype, shape)) in enumerate(zip(entry.parts, layout, strict=True)):
        if formed is not None and entry.is_formed(i):
            parts.append(formed(i).view(dtype).reshape(shape))
        elif part == "nested_offset":
            parts.append(torch.tensor(entry.nested_offset, dtype=torch.float32, device="cpu"))
        else:
            parts.append(as_part(member, read(member), dtype, shape))
    return parts


def as_part(
    member: str, found: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    """What a tensor of a file, which lies there as the part does, is of that type and shape."""
    if dtype is torch.uint8:  # 8-bit codes have types of their own, packed ones may have any
        found = found.contiguous().reshape(-1).view(torch.uint8)
    if found.numel() != math.prod(shape) or found.is_floating_point() != dtype.is_floating_point:
        raise BadFile(
            f"{member}: must be {str(dtype).removeprefix('torch.')} {list(shape)}, got "
            f"{str(found.dtype).removeprefix('torch.')} {list(found.shape)}"
        )
    return found.to(dtype).reshape(shape)  # peers write scales in bf16 or as [1] too


def described(facts: Mapping[str, Any]) -> list[Entry]:
    """The weights that an op found among tensors. Ordinary float tensors are none here."""
    found: list[Entry] = []
    for weight in facts["weights"]:
        storage, compute = Storage.parse(weight["storage"]), weight["compute"]
        if compute is None and storage.holds_values:
            continue
        found.append(
            Entry(
                weight["name"],
                tuple(weight["shape"]),
                None,
                storage,
                DISK_DTYPES[compute] if compute else None,
                tuple(weight["parts"]),
                tuple(weight["beside"]),
                weight["nested_offset"],
                tuple(weight["forms"]),
            )
        )
    return found


def entries(tensors: Mapping[str, torch.Tensor], where: str) -> list[Entry]:
    """What tensors under the names of files mean, by the rule that files are read by."""
    found = [_stowed_entry(n, t) for n, t in tensors.items() if isinstance(t, StowedTensor)]
    plain = {name: t for name, t in tensors.items() if not isinstance(t, StowedTensor)}
    facts = _describe(plain, where)
    weights = described(facts)
    taken = {member for entry in weights for member in entry.members}
    found += weights
    for name, tensor in plain.items():
        if name not in taken:
            beside = facts["unreadable"].get(name, "")
            shape = tuple(tensor.shape)
            found.append(Entry(name, shape, tensor.dtype, parts=(name,), scaled_by=beside))
    return found


def _describe(tensors: Mapping[str, torch.Tensor], where: str) -> dict[str, Any]:
    listed = json.dumps([_facts(name, tensor) for name, tensor in tensors.items()])
    try:
        told = library.state_describe(where, listed, [_short_bytes(t) for t in tensors.values()])
    except RuntimeError as error:
        raise translated(error) from None
    facts: dict[str, Any] = json.loads(library.text(told))
    return facts


def _facts(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    """A tensor as ops take it. What no file can hold is no weight, whatever it is."""
    shape, dtype = list(tensor.shape), DISK_NAMES.get(tensor.dtype, "")
    if len(shape) > _MOST_DIMENSIONS:
        shape, dtype = [tensor.numel()], ""
    return {"name": name, "dtype": dtype, "shape": shape, "bytes": tensor.nbytes}


def _short_bytes(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta or tensor.nbytes > _SHORT:
        return torch.empty(0, dtype=torch.uint8)
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _stowed_entry(name: str, weight: StowedTensor) -> Entry:
    shape = tuple(weight.shape)
    if is_cast_of_itself(weight) or is_plain(
        weight
    ):  # a plain parameter while its model is offloaded
        return Entry(name, shape, weight.dtype, parts=(name,))
    return Entry(name, shape, None, weight._storage, weight.dtype, (name,))

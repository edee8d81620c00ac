# SPDX-License-Identifier: Apache-2.0
"""Resting weights as the plain tensors that files hold, and back: names, types and shapes of
docs/formats.md. What is not ours in these names is bitsandbytes', so that it reads our files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from stowage import ops
from stowage._errors import BadFile, InvalidArgument, translated
from stowage._model.casts import is_cast_of_itself, is_plain
from stowage._storage import NESTED_BLOCK, Storage
from stowage.tensor import StowedTensor

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

_PARTS = {
    "": "codes",
    "_scale": "scale",
    ".absmax": "absmax",
    ".nested_absmax": "nested_absmax",
    ".nested_quant_map": "nested_map",
    ".quantized_scalers": "quantized_scalers",
    ".quantization_factor": "quantization_factor",
    ".scaler_mean": "scaler_mean",
    ".nf4": "nf4",
}
_STATE = ".quant_state.bitsandbytes__"
FLOAT8 = {torch.float8_e4m3fn: "f8_e4m3", torch.float8_e5m2: "f8_e5m2"}
_TORCHAO = ("quantized_scalers", "quantization_factor", "scaler_mean", "nf4")
_TYPES = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float64: "f64",
}

Read = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class Entry:
    """One weight or tensor of a file or a state, under the name that a model gives it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None  # of a plain tensor; None: a type that torch does not have
    storage: Storage | None  # None: plain
    compute: torch.dtype | None  # where the file says it
    members: tuple[str, ...]  # names of its tensors, the codes first
    unshaped: bool = False  # only the number of elements is known: `shape` is [elements]


def on_disk(name: str, storage: Storage, shape: Iterable[int]) -> list[dict[str, Any]]:
    """The tensors that a weight becomes in a file: name, dtype and shape of each."""
    try:
        declared: list[dict[str, Any]] = json.loads(
            ops.text(ops.storage_on_disk(name, storage.key, list(shape)))
        )
    except RuntimeError as error:
        raise translated(error) from None
    return declared


def flatten(name: str, weight: StowedTensor) -> dict[str, torch.Tensor]:
    """The tensors that `weight` becomes in a file. They share its memory."""
    storage, parts, flat = weight._storage, weight.parts, {}
    for tensor in on_disk(name, storage, weight.shape):
        member: str = tensor["name"]
        suffix = member.removeprefix(name)
        if suffix in _PARTS:
            flat[member] = parts[_PARTS[suffix]].detach().view(DISK_DTYPES[tensor["dtype"]])
        elif suffix == ".quant_map":
            flat[member] = torch.tensor(storage.values, dtype=torch.float32)
        else:
            flat[member] = _state_tensor(weight, *tensor["shape"])
    return flat


def _state_tensor(weight: StowedTensor, size: int) -> torch.Tensor:
    storage = weight._storage
    state = {
        "quant_type": storage.codes,
        "blocksize": storage.block,
        "dtype": str(weight.dtype).removeprefix("torch."),
        "shape": list(weight.shape),
    }
    if storage.nested:
        offset = weight.parts["nested_offset"].item()
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32"}
        state["nested_offset"] = offset  # fp64 text of an fp32 value: exact
    return torch.frombuffer(bytearray(json.dumps(state).ljust(size).encode()), dtype=torch.uint8)


def unflatten(entry: Entry, read: Read) -> list[torch.Tensor]:
    """The parts of a weight in the order of its layout, reading its tensors by name. They share
    the memory of what `read` gives, where its type is the layout's."""
    assert entry.storage is not None
    storage, name = entry.storage, entry.members[0]
    if storage.bits == 4:
        _check_map(entry, read)
    suffixes = {part: suffix for suffix, part in _PARTS.items()}
    parts = []
    for part, dtype, shape in storage.layout(entry.shape):
        if part == "nested_offset":
            offset = _state(read(_state_member(entry.members)))["nested_offset"]
            parts.append(torch.tensor(offset, dtype=torch.float32))
            continue
        member = name + suffixes[part]
        parts.append(_as_part(member, read(member), dtype, shape))
    return parts


def _as_part(
    member: str, found: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    if dtype is torch.uint8:  # 8-bit codes have types of their own, packed ones may have any
        found = found.contiguous().reshape(-1).view(torch.uint8)
    if found.numel() != math.prod(shape) or found.is_floating_point() != dtype.is_floating_point:
        raise BadFile(
            f"{member}: must be {str(dtype).removeprefix('torch.')} {list(shape)}, got "
            f"{str(found.dtype).removeprefix('torch.')} {list(found.shape)}"
        )
    return found.to(dtype).reshape(shape)  # peers write scales in bf16 or as [1] too


def _check_map(entry: Entry, read: Read) -> None:
    member = f"{entry.members[0]}.quant_map"
    if entry.storage is None or member not in entry.members:
        return
    found, known = read(member), torch.tensor(entry.storage.values, dtype=torch.float32)
    if found.shape != known.shape or not torch.allclose(found.float(), known, rtol=0, atol=1e-6):
        raise BadFile(f"{member}: must be the table of {entry.storage.codes}, got other values")


def _state_member(members: Iterable[str]) -> str:
    return next(member for member in members if _STATE in member)


def _state(tensor: torch.Tensor) -> dict[str, object]:
    state = json.loads(bytes(tensor.view(torch.uint8).tolist()))
    if not isinstance(state, dict):
        raise BadFile(f"a quant_state must be a JSON object, got {type(state).__name__}")
    return state


def entries(tensors: Mapping[str, torch.Tensor]) -> list[Entry]:
    """What flat tensors under file names mean. A weight with block scales inside its rows is told
    by the count of them, which is one block size among the powers of two."""
    found: list[Entry] = []
    taken: set[str] = set()
    for name, tensor in tensors.items():
        if isinstance(tensor, StowedTensor):
            found.append(_stowed_entry(name, tensor))
        elif _STATE in name:
            found.append(_four_bit(name, tensors))
        elif f"{name}.quantized_scalers" in tensors:
            found.append(_torchao(name, tensors))
        elif f"{name}_scale" in tensors and (tensor.dtype in FLOAT8 or tensor.dtype is torch.int8):
            found.append(_scaled(name, tensor, tensors[f"{name}_scale"]))
        elif tensor.dtype in FLOAT8:
            storage = Storage.parse(FLOAT8[tensor.dtype])
            found.append(Entry(name, tuple(tensor.shape), None, storage, None, (name,)))
        else:
            continue
        taken.update(found[-1].members)
    for name, tensor in tensors.items():
        if name not in taken:
            found.append(Entry(name, tuple(tensor.shape), tensor.dtype, None, None, (name,)))
    return found


def _stowed_entry(name: str, weight: StowedTensor) -> Entry:
    if is_cast_of_itself(weight) or is_plain(
        weight
    ):  # a plain parameter while its model is offloaded
        return Entry(name, tuple(weight.shape), weight.dtype, None, None, (name,))
    return Entry(name, tuple(weight.shape), None, weight._storage, weight.dtype, (name,))


def _four_bit(member: str, tensors: Mapping[str, torch.Tensor]) -> Entry:
    name, _, kind = member.partition(_STATE)
    state = _state(tensors[member])
    missing = [key for key in ("quant_type", "blocksize", "shape") if key not in state]
    if missing:
        raise BadFile(f"{member}: must have quant_type, blocksize and shape, misses {missing}")
    if kind not in ("nf4", "fp4") or state["quant_type"] != kind:
        raise BadFile(
            f"{member}: quant_type must be nf4 or fp4, in the name too, got {state['quant_type']!r}"
        )
    nested = ":nested" if "nested_offset" in state else ""
    storage = Storage.parse(f"{kind}:block{state['blocksize']}{nested}")
    shape = tuple(int(size) for size in state["shape"])  # type: ignore[attr-defined]
    members = tuple(t["name"] for t in on_disk(name, storage, shape) if t["name"] in tensors)
    compute = getattr(torch, str(state.get("dtype", "")), None)
    return Entry(name, shape, None, storage, compute, members)


def _torchao(name: str, tensors: Mapping[str, torch.Tensor]) -> Entry:
    """nf4:torchao. Its tensors tell all but the shape, which is that of the model."""
    members = (name, *(name + s for s in _PARTS if s[1:] in _TORCHAO))
    missing = [member for member in members if member not in tensors]
    if missing:
        raise InvalidArgument(f"{name}: must have all parts of nf4:torchao, misses {missing}")
    elements, (scalers, factor) = tensors[name].nbytes * 2, (tensors[m] for m in members[1:3])
    if not factor.numel() or factor.dtype not in _TYPES:
        raise InvalidArgument(f"{members[2]}: must be numbers of f32, bf16, f16 or f64, got none")
    sizes = f"block{elements // scalers.numel()}:scaler{scalers.numel() // factor.numel()}"
    storage = Storage.parse(f"nf4:torchao:{sizes}:{_TYPES[factor.dtype]}")
    return Entry(name, (elements,), None, storage, None, members, unshaped=True)


def _scaled(name: str, codes: torch.Tensor, scale: torch.Tensor) -> Entry:
    base = FLOAT8.get(codes.dtype, "int8")
    shape = tuple(codes.shape)
    storage = _storage_of_scale(base, shape, tuple(scale.shape))
    if storage is None:
        raise InvalidArgument(
            f"{name}_scale: must have the shape of a scaling of {list(shape)}, got "
            f"{list(scale.shape)}"
        )
    return Entry(name, shape, None, storage, None, (name, f"{name}_scale"))


def _storage_of_scale(base: str, shape: tuple[int, ...], scale: tuple[int, ...]) -> Storage | None:
    if math.prod(scale) == 1 and len(scale) <= 1:
        return Storage.parse(f"{base}:tensor")
    kinds = ["row", "row2", *(f"block{1 << power}" for power in range(4, 17))]
    for kind in kinds:
        if kind == "row2" and len(shape) < 3:
            continue
        storage = Storage.parse(f"{base}:{kind}")
        if storage.layout(shape)[1][2] == scale:
            return storage
    return None

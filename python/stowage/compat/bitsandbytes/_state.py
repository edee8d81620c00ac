# SPDX-License-Identifier: Apache-2.0
"""`QuantState`: scales, table and shape of a weight in packed 4-bit codes, as bitsandbytes keeps
them beside the codes, and as its files spell them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stowage._ops.errors import InvalidArgument

PREFIX = "bitsandbytes__"
_FACTS = ("quant_type", "blocksize", "dtype", "shape")
_NESTED_FACTS = ("nested_blocksize", "nested_dtype", "nested_offset")


class QuantState:
    """What turns packed codes into values again. Attributes are the arguments; `nested` tells
    whether `absmax` are 8-bit codes, which `state2` and `offset` then decode.

    absmax: fp32 or, nested, uint8 [blocks]. code: fp32, the values by code. shape, dtype: of the
    weight. state2: the QuantState of the block scales.
    """

    valid_quant_types = ("fp4", "nf4")
    valid_qs_type_keys = tuple(PREFIX + kind for kind in valid_quant_types)
    valid_qs_keys = (
        "absmax",
        "quant_map",
        "nested_absmax",
        "nested_quant_map",
        "quant_state",
        *_FACTS,
        *_NESTED_FACTS,
    )

    def __init__(
        self,
        absmax: Tensor,
        shape: torch.Size | None = None,
        code: Tensor | None = None,
        blocksize: int | None = None,
        quant_type: str | None = None,
        dtype: torch.dtype | None = None,
        offset: Tensor | None = None,
        state2: QuantState | None = None,
    ) -> None:
        self.absmax: Any = absmax
        self.shape: Any = shape
        self.code: Any = code
        self.dtype: Any = dtype
        self.blocksize: Any = blocksize
        self.quant_type: Any = quant_type
        self.offset: Any = offset
        self.state2: Any = state2
        self.nested = state2 is not None

    def __getattr__(self, name: str) -> Any:
        if name.startswith(PREFIX) and name == f"{PREFIX}{self.__dict__.get('quant_type')}":
            return self.as_dict(packed=True)[f"quant_state.{name}"]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __getitem__(self, index: Any) -> Any:
        """The list that stood for a state in old releases."""
        inner = [self.offset, self.state2] if self.nested else None
        whole = [self.absmax, self.shape, self.dtype, self.blocksize, inner, self.quant_type]
        return whole[index]

    @classmethod
    def from_dict(cls, qs_dict: Mapping[str, Any], device: Any) -> QuantState:
        """The state that `as_dict` wrote, packed or not, its tensors on `device`. Names may have
        prefixes; `qs_dict` is not changed. Raises InvalidArgument for what is no such state."""
        found = _unpacked(qs_dict)
        unknown = sorted(found.keys() - set(cls.valid_qs_keys))
        missing = [key for key in ("absmax", "quant_map", *_FACTS) if key not in found]
        if "nested_absmax" in found:
            missing += [k for k in ("nested_quant_map", *_NESTED_FACTS) if k not in found]
        if unknown or missing:
            raise InvalidArgument(
                f"QuantState.from_dict: keys must be those of a quant_state, missing {missing}, "
                f"unknown {unknown}"
            )
        if found["quant_type"] not in (None, *cls.valid_quant_types):  # None: of 8-bit codes
            raise InvalidArgument(
                f"QuantState.from_dict: quant_type must be one of {list(cls.valid_quant_types)} or "
                f"None, got {found['quant_type']!r}"
            )
        offset = state2 = None
        if "nested_absmax" in found:
            offset = torch.tensor(float(found["nested_offset"]), dtype=torch.float32).to(device)
            state2 = cls(
                found["nested_absmax"].to(device),
                code=found["nested_quant_map"].to(device),
                blocksize=found["nested_blocksize"],
                dtype=_dtype(found["nested_dtype"]),
            )
        return cls(
            found["absmax"].to(device),
            None if found["shape"] is None else torch.Size(found["shape"]),
            found["quant_map"].to(device),
            found["blocksize"],
            found["quant_type"],
            _dtype(found["dtype"]),
            offset,
            state2,
        )

    def as_dict(self, packed: bool = False) -> dict[str, Any]:
        """Names to tensors, numbers and strings; `packed` puts what is no tensor into one tensor of
        JSON, `quant_state.bitsandbytes__<type>`, so that all can be saved."""
        facts: dict[str, Any] = {
            "quant_type": self.quant_type,
            "absmax": self.absmax,
            "blocksize": self.blocksize,
            "quant_map": self.code,
            "dtype": _dtype_name(self.dtype),
            "shape": None if self.shape is None else tuple(self.shape),
        }
        if self.nested:
            facts |= {
                "nested_absmax": self.state2.absmax,
                "nested_blocksize": self.state2.blocksize,
                # safetensors refuses memory that two names share, as all maps of a model may
                "nested_quant_map": self.state2.code.clone(),
                "nested_dtype": _dtype_name(self.state2.dtype),
                "nested_offset": self.offset.item(),
            }
        if not packed or self.quant_type is None:
            return facts
        tensors = {key: value for key, value in facts.items() if isinstance(value, Tensor)}
        text = json.dumps({key: value for key, value in facts.items() if key not in tensors})
        state = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        return tensors | {f"quant_state.{PREFIX}{self.quant_type}": state}

    def to(self, device: Any) -> None:
        """Moves the tensors, in place."""
        self.absmax = self.absmax.to(device)
        self.code = None if self.code is None else self.code.to(device)
        if self.nested:
            self.offset = self.offset.to(device)
            self.state2.to(device)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, QuantState) or self.nested != other.nested:
            return False
        names = ("shape", "dtype", "blocksize", "quant_type")
        if any(getattr(self, name) != getattr(other, name) for name in names):
            return False
        return (
            _close(self.absmax, other.absmax)
            and _close(self.code, other.code)
            and _close(self.offset, other.offset)
            and self.state2 == other.state2
        )

    __hash__ = None  # type: ignore[assignment]


def _unpacked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Without prefixes, and with the content of the tensor of JSON."""
    given = {k.rpartition("quant_state.")[1] + k.rpartition(".")[2]: v for k, v in given.items()}
    states = [k for k, v in given.items() if "quant_state" in k and isinstance(v, Tensor)]
    legal = QuantState.valid_qs_type_keys
    if "quant_type" not in given and (
        len(states) != 1 or states[0].rpartition(".")[2] not in legal
    ):
        raise InvalidArgument(
            f"QuantState.from_dict: exactly one quant_state that ends in one of {list(legal)} must "
            f"be there, got {states}"
        )
    found = {k.rpartition(".")[2]: v for k, v in given.items() if k not in states}
    for key in states:
        content = json.loads(bytes(given[key].cpu().view(torch.uint8).tolist()))
        if not isinstance(content, dict):
            raise InvalidArgument(f"QuantState.from_dict: {key} must be a JSON object")
        found |= content
    return found


def _dtype(name: Any) -> torch.dtype:
    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise InvalidArgument(f"QuantState.from_dict: dtype must be one of torch's, got {name!r}")
    return found


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _close(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    if one.shape != other.shape:
        return False
    return bool(torch.allclose(one.float(), other.float(), rtol=1e-5, atol=1e-6, equal_nan=True))


torch.serialization.add_safe_globals([QuantState])

# SPDX-License-Identifier: Apache-2.0
"""`Params4bit`: a parameter that holds packed codes and their QuantState."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stowage._ops import _torch
from stowage._ops.errors import InvalidArgument
from stowage.compat.bitsandbytes import functional
from stowage.compat.bitsandbytes._state import QuantState


class Params4bit(nn.Parameter):
    """Float values until it is moved to a device for the first time (`.to("cpu")` too), packed
    codes [bytes, 1] from then on, with `quant_state`. Dtypes of modules do not reach the codes."""

    quant_state: Any
    blocksize: int
    compress_statistics: bool
    quant_type: str
    quant_storage: torch.dtype
    bnb_quantized: bool

    def __new__(
        cls,
        data: Tensor | None = None,
        requires_grad: bool = False,
        quant_state: QuantState | None = None,
        blocksize: int | None = None,
        compress_statistics: bool | None = True,
        quant_type: str = "fp4",
        quant_storage: torch.dtype = torch.uint8,
        module: nn.Module | None = None,
        bnb_quantized: bool = False,
        **kwargs: Any,
    ) -> Any:
        held = torch.empty(0) if data is None else data.detach()
        self = _torch.make_subclass(cls, held, requires_grad)
        self.blocksize = 64 if blocksize is None else blocksize
        self.compress_statistics = bool(compress_statistics)
        self.quant_type = quant_type
        self.quant_state = quant_state
        self.quant_storage = quant_storage
        self.bnb_quantized = bnb_quantized
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @classmethod
    def from_prequantized(
        cls,
        data: Tensor,
        quantized_stats: Mapping[str, Any],
        requires_grad: bool = False,
        device: Any = None,
        module: nn.Module | None = None,
        **kwargs: Any,
    ) -> Params4bit:
        """From packed codes and the entries of `QuantState.as_dict`. `device`: where they go; by
        default to the current accelerator if there is one, else they stay."""
        if device is None:
            device = "cuda" if torch.cuda.is_available() else data.device
        state = QuantState.from_dict(quantized_stats, device)
        return cls(
            data.to(device),
            requires_grad,
            state,
            state.blocksize,
            state.nested,
            state.quant_type,
            data.dtype,
            bnb_quantized=True,
        )

    def _quantize(self, device: Any) -> Params4bit:
        packed, state = functional.quantize_4bit(
            self.detach().contiguous().to(device),
            blocksize=self.blocksize,
            compress_statistics=self.compress_statistics,
            quant_type=self.quant_type,
            quant_storage=self.quant_storage,
        )
        self.data, self.quant_state, self.bnb_quantized = packed, state, True
        return self

    def _adopt(self, other: Params4bit) -> None:
        """Becomes `other` and stays the object that modules and optimizers know."""
        device = self.device
        self.data = other.data.to(device)
        self.__dict__.update(other.__dict__)
        if self.quant_state is not None:
            self.quant_state.to(device)

    def dequantize(self) -> Tensor:
        return functional.dequantize_4bit(self, self.quant_state)

    # --- moves ------------------------------------------------------------------------------------

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Quantizes on the first move to a device; a dtype changes only values that are not
        quantized yet."""
        device, dtype, non_blocking, _ = _torch.parse_to(*args, **kwargs)
        if not self.bnb_quantized:
            if device is None or device.type == "meta":
                return self._twin(super().to(*args, **kwargs), self.quant_state)
            if dtype is not None:
                self.data = self.data.to(dtype)
            return self._quantize(device)
        if device is None or device == self.device:
            return self
        state = copy.copy(self.quant_state)
        if state is not None:
            state.state2 = copy.copy(state.state2)
            state.to(device)
        return self._twin(self.data.to(device, non_blocking=non_blocking), state)

    def _twin(self, data: Tensor, state: Any) -> Params4bit:
        made = Params4bit(data, self.requires_grad)
        made.__dict__.update(self.__dict__)
        made.quant_state = state
        return made

    def cpu(self, *args: Any, **kwargs: Any) -> Any:
        return self.to("cpu")

    def cuda(self, device: Any = None, non_blocking: bool = False, *_: Any, **__: Any) -> Any:
        return self.to("cuda" if device is None else device, non_blocking=non_blocking)

    def xpu(self, device: Any = None, non_blocking: bool = False, *_: Any, **__: Any) -> Any:
        return self.to("xpu" if device is None else device, non_blocking=non_blocking)

    def half(self, *args: Any) -> Any:
        return self if self.bnb_quantized else super().half(*args)

    def float(self, *args: Any) -> Any:
        return self if self.bnb_quantized else super().float(*args)

    def double(self, *args: Any) -> Any:
        return self if self.bnb_quantized else super().double(*args)

    def bfloat16(self, *args: Any) -> Any:
        return self if self.bnb_quantized else super().bfloat16(*args)

    # --- copies -----------------------------------------------------------------------------------

    def __copy__(self) -> Params4bit:
        return self._twin(self.data, self.quant_state)

    def __deepcopy__(self, memo: dict[int, Any]) -> Params4bit:
        if id(self) not in memo:
            memo[id(self)] = made = self._twin(copy.deepcopy(self.data, memo), None)
            made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _rebuild, (self.data, self.requires_grad, dict(self.__dict__))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Pieces of the packed codes keep the state, for libraries that shard them."""
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func in (torch.chunk, torch.split):
            return tuple(args[0]._twin(piece, args[0].quant_state) for piece in result)
        return result

    # --- what of the state others ask of the parameter --------------------------------------------

    def _known(self, *names: str) -> Any:
        found = self.__dict__.get("quant_state")
        for name in names:
            found = getattr(found, name, None)
        if found is None:
            raise AttributeError(f"this Params4bit has no {'.'.join(('quant_state', *names))}")
        return found

    absmax = property(lambda self: self._known("absmax"))
    code = quant_map = property(lambda self: self._known("code"))
    nested_absmax = property(lambda self: self._known("state2", "absmax"))
    nested_blocksize = property(lambda self: self._known("state2", "blocksize"))
    nested_quant_map = property(lambda self: self._known("state2", "code"))
    nested_dtype = property(lambda self: self._known("state2", "dtype"))
    nested_offset = property(lambda self: self._known("offset"))

    @property
    def offset(self) -> Tensor | None:
        """None of a state whose scales are plain."""
        return self._known().offset

    @property
    def state2(self) -> QuantState | None:
        return self._known().state2


def _rebuild(data: Tensor, requires_grad: bool, facts: dict[str, Any]) -> Params4bit:
    """What pickles of a Params4bit call. Files depend on it: keep its name and arguments."""
    made = Params4bit(data, requires_grad)
    made.__dict__.update(facts)
    return made


def quantized(weight: Tensor) -> Any:
    """The QuantState of a module's weight. Raises InvalidArgument before the first move."""
    state = getattr(weight, "quant_state", None)
    if state is None:
        raise InvalidArgument(
            "stowage: a 4-bit module must be quantized before it computes, got float values; "
            "call .to(device) first, .to('cpu') too"
        )
    return state


torch.serialization.add_safe_globals([Params4bit, _rebuild])

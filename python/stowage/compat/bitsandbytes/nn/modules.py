# SPDX-License-Identifier: Apache-2.0
"""`bitsandbytes.nn.modules`: 4-bit Linear and Embedding. Codes are never rearranged in place, so a
forward changes nothing that is saved; what a module saves, it loads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stowage._ops import _torch
from stowage._ops.errors import StowageError
from stowage.compat.bitsandbytes import _weight, functional
from stowage.compat.bitsandbytes._peer import forwarded
from stowage.compat.bitsandbytes.nn._params import Params4bit, quantized

__all__ = [
    "Embedding4bit",
    "EmbeddingFP4",
    "EmbeddingNF4",
    "Linear4bit",
    "LinearFP4",
    "LinearNF4",
    "Params4bit",
]
PEERS = frozenset(
    {
        "Embedding",
        "Embedding8bit",
        "Int8Params",
        "Linear8bitLt",
        "OutlierAwareLinear",
        "StableEmbedding",
    }
)


def __getattr__(name: str) -> Any:
    return forwarded("bitsandbytes.nn.modules", PEERS, name)


def _holds_codes(weight: Any) -> bool:
    """Whether it is a column of codes, as a parameter of float values is not."""
    known: bool = getattr(weight, "bnb_quantized", True)
    return known and weight.dim() == 2 and weight.shape[1] == 1


class _FourBit(nn.Module):
    """State dicts of a module whose `weight` is a Params4bit."""

    weight: Any
    _known_state: Any = None  # the last that the weight had

    @property
    def quant_state(self) -> Any:
        """That of the weight, or the last that it had, where a library has put the bare codes in
        its place; None until it is quantized."""
        state = getattr(self.weight, "quant_state", None)
        if state is not None:
            if state is not self._known_state:
                self._known_state = state
            return state
        return self._known_state if _holds_codes(self.weight) else None

    @quant_state.setter
    def quant_state(self, state: Any) -> None:
        self._known_state = state
        self.weight.quant_state = state

    def _quantized(self) -> Any:
        """The state to compute with, which the weight gets back. Raises InvalidArgument before the
        first move."""
        weight, state = self.weight, self.quant_state
        if state is not None and getattr(weight, "quant_state", None) is None:
            if not isinstance(weight, Params4bit):
                facts = (state.blocksize, state.nested, state.quant_type, weight.dtype)
                self.weight = Params4bit(weight, False, state, *facts, bnb_quantized=True)
            self.weight.quant_state = state
        return quantized(self.weight)

    @_torch.overrides
    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        """Moves the weight with its state; torch would move the codes alone."""
        held = self.weight
        moved = fn(held)
        if moved is not held and isinstance(held, Params4bit):
            if not isinstance(moved, Params4bit):
                moved = held._twin(moved, held.quant_state)
            if moved.is_meta or held.is_meta:
                self.weight = moved
            else:
                held.data = moved.data
                held.__dict__.update(moved.__dict__)
        return super()._apply(fn, recurse)

    @_torch.overrides
    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.quant_state is not None:
            for name, part in self.quant_state.as_dict(packed=True).items():
                destination[f"{prefix}weight.{name}"] = part if keep_vars else part.detach()

    @_torch.overrides
    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Takes quantized weights, whatever their block and type, and float ones, which are
        quantized just in time where the module is quantized."""
        name = f"{prefix}weight"
        stats = {k.removeprefix(name): v for k, v in state_dict.items() if k.startswith(name + ".")}
        value, rest, missing = state_dict.get(name), state_dict, missing_keys
        packed = any(".quant_state." in key for key in stats)
        if value is not None and (packed or getattr(self.weight, "bnb_quantized", False)):
            try:
                self._take(value, stats if packed else {}, local_metadata)
            except StowageError as error:
                error_msgs.append(f"{name}: {error}")
            taken = {name, *(name + key for key in stats)}
            rest = {k: v for k, v in state_dict.items() if k not in taken}
            missing = []
        super()._load_from_state_dict(
            rest, prefix, local_metadata, strict, missing, unexpected_keys, error_msgs
        )
        if missing is not missing_keys:
            missing_keys.extend(key for key in missing if key != name)

    def _take(self, value: Tensor, stats: dict[str, Any], metadata: Mapping[str, Any]) -> None:
        assign = bool(metadata.get("assign_to_params_buffers", False))
        if stats:
            made = Params4bit.from_prequantized(value, stats, device=value.device)
            _weight.weight_of(made, made.quant_state)  # codes and scales belong together
            made = made if assign else copy.deepcopy(made)
        else:
            held = self.weight
            made = Params4bit(
                value.to("cpu" if held.is_meta else held.device),
                blocksize=held.blocksize,
                compress_statistics=held.compress_statistics,
                quant_type=held.quant_type,
                quant_storage=held.quant_storage,
            )
            made = made.to(made.device)
        if tuple(made.quant_state.shape) != self._shape():
            raise StowageError(
                f"the shape must be {list(self._shape())}, got {list(made.quant_state.shape)}"
            )
        if assign or self.weight.is_meta:
            self.weight = made
        else:
            self.weight._adopt(made)

    def _shape(self) -> tuple[int, int]:
        raise NotImplementedError


class Linear4bit(_FourBit, nn.Linear):
    """A linear layer with a 4-bit weight and a plain bias. Inputs are cast to `compute_dtype` and
    results back; None takes the dtype of the first input (fp32 or bf16)."""

    def __init__(
        self,
        input_features: int,
        output_features: int,
        bias: bool = True,
        compute_dtype: torch.dtype | None = None,
        compress_statistics: bool = True,
        quant_type: str = "fp4",
        quant_storage: torch.dtype = torch.uint8,
        device: Any = None,
    ) -> None:
        nn.Linear.__init__(self, input_features, output_features, bias, device)
        self.weight = Params4bit(
            self.weight,
            compress_statistics=compress_statistics,
            quant_type=quant_type,
            quant_storage=quant_storage,
        )
        self.compute_dtype = compute_dtype
        self.compute_type_is_set = compute_dtype is not None
        self.quant_storage = quant_storage

    def set_compute_type(self, x: Tensor) -> None:
        if x.dtype in (torch.float32, torch.bfloat16):
            self.compute_dtype = x.dtype

    def forward(self, x: Tensor) -> Tensor:
        state = self._quantized()
        if not self.compute_type_is_set:
            self.set_compute_type(x)
            self.compute_type_is_set = True
        compute = x.dtype if self.compute_dtype is None else self.compute_dtype
        bias = None if self.bias is None else self.bias.to(compute)
        result = functional.matmul_4bit(x.to(compute), self.weight, state, bias=bias)
        return result.to(x.dtype)

    def _shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features


class LinearFP4(Linear4bit):
    """Linear4bit in fp4."""

    def __init__(
        self,
        input_features: int,
        output_features: int,
        bias: bool = True,
        compute_dtype: torch.dtype | None = None,
        compress_statistics: bool = True,
        quant_storage: torch.dtype = torch.uint8,
        device: Any = None,
    ) -> None:
        facts = (compute_dtype, compress_statistics, "fp4", quant_storage, device)
        super().__init__(input_features, output_features, bias, *facts)


class LinearNF4(Linear4bit):
    """Linear4bit in nf4."""

    def __init__(
        self,
        input_features: int,
        output_features: int,
        bias: bool = True,
        compute_dtype: torch.dtype | None = None,
        compress_statistics: bool = True,
        quant_storage: torch.dtype = torch.uint8,
        device: Any = None,
    ) -> None:
        facts = (compute_dtype, compress_statistics, "nf4", quant_storage, device)
        super().__init__(input_features, output_features, bias, *facts)


class Embedding4bit(_FourBit, nn.Embedding):
    """An embedding with a 4-bit table; a look-up decodes the rows that it needs."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        dtype: torch.dtype | None = None,
        quant_type: str = "fp4",
        quant_storage: torch.dtype = torch.uint8,
        device: Any = None,
    ) -> None:
        nn.Embedding.__init__(self, num_embeddings, embedding_dim, device=device, dtype=dtype)
        self.dtype = self.weight.dtype
        self.weight = Params4bit(
            self.weight,
            compress_statistics=False,
            quant_type=quant_type,
            quant_storage=quant_storage,
        )

    def forward(self, input: Tensor) -> Tensor:
        state = self._quantized()
        table = _weight.weight_of(self.weight, state)
        return _weight.rows(input, table, state.dtype).to(self.dtype)

    def _shape(self) -> tuple[int, int]:
        return self.num_embeddings, self.embedding_dim


class EmbeddingFP4(Embedding4bit):
    """Embedding4bit in fp4."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        dtype: torch.dtype | None = None,
        quant_storage: torch.dtype = torch.uint8,
        device: Any = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, dtype, "fp4", quant_storage, device)


class EmbeddingNF4(Embedding4bit):
    """Embedding4bit in nf4."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        dtype: torch.dtype | None = None,
        quant_storage: torch.dtype = torch.uint8,
        device: Any = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, dtype, "nf4", quant_storage, device)

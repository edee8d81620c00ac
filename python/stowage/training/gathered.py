# SPDX-License-Identifier: Apache-2.0
"""What FSDP2 gathers of a float8 weight: bytes, and the tensor that layers compute with.

One uint8 tensor [rows, length], so that every backend can carry it. A scale for the tensor is known
to every rank and does not travel: length = columns. Scales of rows travel in the rows, as an fp32
factor before the codes, filled with zeros to 4 bytes: length = 4 ceil((4 + columns) / 4).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._pytree import tree_map

from stowage._errors import InvalidArgument, Unsupported
from stowage.training.layers import Layer
from stowage.training.linear import linear
from stowage.training.products import Cast

aten = torch.ops.aten
_FACTOR = 4  # bytes


class Facts(NamedTuple):
    """What the ranks know without sending it."""

    layer: Layer
    factor: Tensor | None  # fp32 scalar; None where rows carry their own
    columns: int
    padded: int  # rows of each rank


def encode(cast: Cast, rows: int, by_rows: bool) -> Tensor:
    """The records of a rank's rows, with zeros up to `rows`: uint8 [rows, length]."""
    codes = cast.codes.view(torch.uint8)
    here, columns = codes.shape
    if not by_rows:
        if here == rows:
            return codes.contiguous()
        return torch.cat([codes, codes.new_zeros(rows - here, columns)])
    records = codes.new_zeros(rows, -(-(_FACTOR + columns) // 4) * 4)
    records[:here, :_FACTOR] = cast.factor.contiguous().view(torch.uint8)
    records[:here, _FACTOR : _FACTOR + columns] = codes
    return records


class GatheredWeight(Tensor):
    """The whole weight as fp8 records, of which layers make fp8 operands. Not to be written."""

    _records: Tensor
    _factor: Tensor | None
    _layer: Layer

    @staticmethod
    def __new__(
        cls,
        records: Tensor,
        factor: Tensor | None,
        layer: Layer,
        columns: int,
        dtype: torch.dtype,
        requires_grad: bool = False,
    ) -> "GatheredWeight":
        self: GatheredWeight = torch.Tensor._make_wrapper_subclass(
            cls,
            (records.shape[0], columns),
            dtype=dtype,
            device=records.device,
            requires_grad=requires_grad,
        )
        self._records, self._factor, self._layer = records, factor, layer
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def cast(self, scale: Tensor | None = None) -> Cast:
        """The codes as they came; `scale` is known already."""
        target = self._layer.recipe.forward
        if self._factor is not None:
            return Cast(self._records.view(target), self._factor)
        factor = self._records[:, :_FACTOR].contiguous().view(torch.float32)
        codes = self._records[:, _FACTOR : _FACTOR + self.shape[1]]
        return Cast(codes.view(target), factor)

    def fresh_scale(self) -> None:
        """There is none to compute: it came with the gather."""

    def dequantize(self) -> Tensor:
        """The values in the dtype that the layer computes in."""
        return self.cast().values(self.dtype)

    def _like(self, rows: int) -> "GatheredWeight":
        records = self._records if rows == len(self._records) else self._records[:rows]
        return GatheredWeight(records, self._factor, self._layer, self.shape[1], self.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GatheredWeight({self._layer.name}, {list(self.shape)}, {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = ["_records"] if self._factor is None else ["_records", "_factor"]
        return names, (self._layer, self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> "GatheredWeight":
        layer, dtype = context
        return GatheredWeight(inner["_records"], inner.get("_factor"), layer, size[1], dtype)

    @classmethod
    def __metadata_guard__(cls, compiled: Any, other: Any) -> bool:
        """A graph holds for every layer of the recipe: its names and counts are not in it."""
        return compiled[0].recipe == other[0].recipe and compiled[1:] == other[1:]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch._C._nn.linear:
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            if type(weight) is GatheredWeight:
                return linear(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        source = args[0] if args else None
        if type(source) is GatheredWeight:
            if func in (aten.detach.default, aten.alias.default):
                return source._like(source.shape[0])
            if func is aten.view.default and list(args[1]) == list(source.shape):
                return source._like(source.shape[0])
            if func is aten.as_strided.default and args[1][1] == source.shape[1]:
                return source._like(args[1][0])
        if func._schema.is_mutable and type(source) is GatheredWeight:
            raise Unsupported(
                f"stowage: {func} must write to the shard of weight {source._layer.name}, got "
                "its gathered fp8 copy"
            )
        plain_args, plain_kwargs = tree_map(_plain, (args, kwargs or {}))
        return func(*plain_args, **plain_kwargs)


def _plain(x: Any) -> Any:
    return x.dequantize() if type(x) is GatheredWeight else x


def receive(records: Tensor, facts: Facts, dtype: torch.dtype, out: Any) -> Any:
    """The gathered weight around `records` and its inner memory, or `out` with its new scale."""
    if facts.factor is None:
        _check_rows(records, facts)
    if out is not None:
        if facts.factor is not None:
            with _unsafe_preserve_version_counter(out._factor):
                out._factor.copy_(facts.factor)
        return None
    factor = None if facts.factor is None else facts.factor.clone()
    weight = GatheredWeight(records, factor, facts.layer, facts.columns, dtype)
    return weight, (records,)


def _check_rows(records: Tensor, facts: Facts) -> None:
    """Every rank sees the same records, so every rank raises."""
    factors = records[:, :_FACTOR].contiguous().view(torch.float32).flatten()
    wrong = (~torch.isfinite(factors)).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise InvalidArgument(
            f"stowage: weight {facts.layer.name} must be finite, got inf or NaN in row "
            f"{row % facts.padded} of rank {row // facts.padded}"
        )

# SPDX-License-Identifier: Apache-2.0
"""What FSDP2 gathers of a float8 weight: bytes, and the tensor that layers compute with.

One uint8 tensor [rows, length], so that every backend can carry it: the records of a weight that
rests in f8_e4m3:row or, where the scale is the tensor's and known to every rank, in f8_e4m3.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._pytree import tree_map

from stowage._errors import InvalidArgument, Unsupported
from stowage._shard.records import Geometry, geometry
from stowage._shard.records import encode as encode_rows
from stowage._storage import Storage
from stowage.training.float8_weight import Float8Weight
from stowage.training.layers import Layer
from stowage.training.products import Cast
from stowage.training.recipes import Recipe

aten = torch.ops.aten


class Facts(NamedTuple):
    """What the ranks know without sending it."""

    layer: Layer
    factor: Tensor | None  # fp32 scalar; None where rows carry their own
    geometry: Geometry  # of the records of each rank
    number: Tensor | None  # of the layer, for graphs


def storage_of(recipe: Recipe) -> Storage:
    """What the gathered rows of a weight would rest in."""
    codes = "f8_e4m3" if recipe.forward is torch.float8_e4m3fn else "f8_e5m2"
    return Storage(f"{codes}:row" if recipe.rows else codes)


def encode(cast: Cast, rows: int, recipe: Recipe) -> tuple[Tensor, Geometry]:
    """The records of a rank's rows, with zeros up to `rows`: uint8 [rows, length]."""
    storage = storage_of(recipe)
    here, columns = cast.codes.shape
    parts = [cast.codes.view(torch.uint8), cast.factor]
    records = encode_rows(parts, storage, (here, columns), 0, here)
    if here < rows:
        records = torch.nn.functional.pad(records, (0, 0, 0, rows - here))
    return records, geometry(storage, (rows, columns))


class GatheredWeight(Float8Weight):
    """The whole weight as fp8 records, of which layers make fp8 operands. Not to be written."""

    _records: Tensor
    _factor: Tensor | None
    _geometry: Geometry

    @staticmethod
    def __new__(
        cls,
        records: Tensor,
        factor: Tensor | None,
        layer: Layer,
        geometry: Geometry,
        dtype: torch.dtype,
        number: Tensor | None = None,
        requires_grad: bool = False,
    ) -> "GatheredWeight":
        self: GatheredWeight = torch.Tensor._make_wrapper_subclass(
            cls,
            (records.shape[0], geometry.columns),
            dtype=dtype,
            device=records.device,
            requires_grad=requires_grad,
        )
        self._records, self._factor = records, factor
        self._layer, self._geometry, self._number = layer, geometry, number
        return self

    def cast(self, scale: Tensor | None = None) -> Cast:
        """The codes as they came; `scale` is known already."""
        target = self._layer.recipe.forward
        if self._factor is not None:
            return Cast(self._records.view(target), self._factor)
        start = self._geometry.scale_bytes
        codes = self._records[:, start : start + self.shape[1]]
        return Cast(codes.view(target), _factors(self._records, self._geometry))

    def fresh_scale(self) -> None:
        """There is none to compute: it came with the gather."""

    def dequantize(self) -> Tensor:
        """The values in the dtype that the layer computes in."""
        return self.cast().values(self.dtype)

    def _like(self, rows: int) -> "GatheredWeight":
        records = self._records if rows == len(self._records) else self._records[:rows]
        facts = (self._layer, self._geometry, self.dtype, self._number)
        return GatheredWeight(records, self._factor, *facts)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GatheredWeight({self._layer.name}, {list(self.shape)}, {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = ["_records", "_factor", "_number"]
        present = [name for name in names if getattr(self, name) is not None]
        return present, (self._layer, self._geometry, self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> "GatheredWeight":
        layer, geometry, dtype = context
        factor, number = inner.get("_factor"), inner.get("_number")
        return GatheredWeight(inner["_records"], factor, layer, geometry, dtype, number)

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


def _factors(records: Tensor, geometry: Geometry) -> Tensor:
    """fp32 [rows, 1]."""
    return records[:, : geometry.scale_bytes].contiguous().view(torch.float32)


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
    weight = GatheredWeight(records, factor, facts.layer, facts.geometry, dtype, facts.number)
    return weight, (records,)


def _check_rows(records: Tensor, facts: Facts) -> None:
    """Every rank sees the same records, so every rank raises."""
    wrong = (~torch.isfinite(_factors(records, facts.geometry))).nonzero()
    if len(wrong):
        row, padded = int(wrong[0, 0]), facts.geometry.rows
        raise InvalidArgument(
            f"stowage: weight {facts.layer.name} must be finite, got inf or NaN in row "
            f"{row % padded} of rank {row // padded}"
        )

# SPDX-License-Identifier: Apache-2.0
"""What FSDP2 gathers of a float8 weight: bytes, and the tensor that layers compute with.

One uint8 tensor [rows, length], so that every backend can carry it: the records of a weight that
rests in f8_e4m3:row or, where the scale is the tensor's and known to every rank, in f8_e4m3. With
gather="high" they are the records of plain values, which each rank casts in the same way. What the
resting and the gathered weight have in common is `Float8Weight`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from stowage._ops import _torch
from stowage._ops._torch import tree_map
from stowage._ops.errors import InvalidArgument, Unsupported
from stowage._ops.storage import Storage
from stowage._shard.records import Geometry, geometry
from stowage._shard.records import encode as encode_rows
from stowage.training.layers import Layer
from stowage.training.operands import linear
from stowage.training.recipes import Recipe, amax_of, row_scales
from stowage.training.scaled_product import Cast, cast

aten = torch.ops.aten


class Float8Weight(Tensor):
    """A weight that F.linear multiplies as fp8; a subclass says where its codes come from."""

    _layer: Layer
    _number: Tensor | None  # of the layer, where compiled graphs need it: recipe "delayed"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @classmethod
    def __metadata_guard__(cls, compiled: Any, other: Any) -> bool:
        """A graph holds for every layer of the recipe: its names and counts are not in it."""
        a, b = compiled[0], other[0]
        same = a.recipe == b.recipe and a.gathered_in_graph == b.gathered_in_graph
        return same and compiled[1:] == other[1:]

    def _stable_hash_for_caching(self) -> str:
        """torch's cache on disk would give what another version of this code computes."""
        raise _torch.BypassAOTAutogradCache(
            "float8 weights of stowage are traced through its own code"
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _torch.linear:
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            if isinstance(weight, Float8Weight) and weight.dim() == 2:
                return linear(*args, **(kwargs or {}))
        with _torch.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Facts(NamedTuple):
    """What the ranks know without sending it."""

    layer: Layer
    scale: Tensor | None  # fp32 scalar, or [all rows, 1]; None where rows have their own
    geometry: Geometry  # of the records of each rank
    wide: torch.dtype  # of the values before the cast
    number: Tensor | None  # of the layer, for graphs


_VALUES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


def storage_of(recipe: Recipe, wide: torch.dtype = torch.float32) -> Storage:
    """What the gathered rows of a weight would rest in; `wide` is the weight's dtype."""
    if recipe.gather == "high":
        return Storage(_VALUES[wide])
    codes = "f8_e4m3" if recipe.forward is torch.float8_e4m3fn else "f8_e5m2"
    return Storage(f"{codes}:row" if recipe.rows else codes)


def encode(weight: Any, scale: Tensor | None, rows: int) -> tuple[Tensor, Geometry]:
    """The records of a rank's rows, with zeros up to `rows`: uint8 [rows, length]."""
    recipe, (here, columns) = weight._layer.recipe, weight.shape
    storage = storage_of(recipe, weight.dtype)
    if recipe.gather == "high":
        parts = [weight._value]
    else:
        codes, factor = weight.cast(scale)
        parts = [codes.view(torch.uint8), factor]
    records = encode_rows(parts, storage, (here, columns), 0, here)
    if here < rows:
        records = torch.nn.functional.pad(records, (0, 0, 0, rows - here))
    return records, geometry(storage, (rows, columns))


class GatheredWeight(Float8Weight):
    """The whole weight as fp8 records, of which layers make fp8 operands. Not to be written."""

    _records: Tensor
    _scale: Tensor | None  # fp32 scalar; None where rows have their own
    _geometry: Geometry
    _wide: torch.dtype

    @staticmethod
    def __new__(
        cls,
        records: Tensor,
        scale: Tensor | None,
        layer: Layer,
        geometry: Geometry,
        wide: torch.dtype,
        dtype: torch.dtype,
        number: Tensor | None = None,
        requires_grad: bool = False,
    ) -> "GatheredWeight":
        self: GatheredWeight = _torch.make_wrapper_subclass(
            cls,
            (records.shape[0], geometry.columns),
            dtype=dtype,
            device=records.device,
            requires_grad=requires_grad,
        )
        self._records, self._scale, self._geometry = records, scale, geometry
        self._layer, self._wide, self._number = layer, wide, number
        return self

    def cast(self, scale: Tensor | None = None, after: Tensor | None = None) -> Cast:
        """The codes as they came, or those of the values; `scale` is known already. Where a graph
        holds the gather they are read once `after` is there."""
        recipe, start = self._layer.recipe, self._geometry.scale_bytes
        records, own = self._records, self._scale
        if after is not None and self._layer.gathered_in_graph and torch.compiler.is_compiling():
            records = torch.ops.stowage.read_after(records, after)
            own = None if own is None else torch.ops.stowage.read_after(own, after)
        if recipe.gather == "high":
            values = records.view(self._wide)
            return cast(values, row_scales(values, recipe) if own is None else own, recipe.forward)
        codes = records[:, start : start + self.shape[1]].view(recipe.forward)
        if own is not None:
            return Cast(codes, torch.ones_like(own) / own)
        return Cast(codes, _factors(records, self._geometry))

    def fresh_scale(self) -> None:
        """There is none to compute: it came with the gather."""

    def dequantize(self) -> Tensor:
        """The values in the dtype that the layer computes in."""
        return self.cast().values(self.dtype)

    def _like(self, rows: int) -> "GatheredWeight":
        records = self._records if rows == len(self._records) else self._records[:rows]
        facts = (self._layer, self._geometry, self._wide, self.dtype, self._number)
        return GatheredWeight(records, self._scale, *facts)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GatheredWeight({self._layer.name}, {list(self.shape)}, {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = ["_records", "_scale", "_number"]
        present = [name for name in names if getattr(self, name) is not None]
        return present, (self._layer, self._geometry, self._wide, self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> "GatheredWeight":
        layer, geometry, wide, dtype = context
        scale, number = inner.get("_scale"), inner.get("_number")
        return GatheredWeight(inner["_records"], scale, layer, geometry, wide, dtype, number)

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
        if _torch.schema(func).is_mutable and type(source) is GatheredWeight:
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
    if facts.scale is None:
        _check_rows(records, facts)
    if out is not None:
        out = _torch.local_of(out)  # a DTensor under tensor parallelism
        if facts.scale is not None:
            with _torch.unsafe_preserve_version_counter(out._scale):
                out._scale.copy_(facts.scale)
        return None
    layer, scale, geometry, wide, number = facts
    own = None if scale is None else scale.clone()
    return GatheredWeight(records, own, layer, geometry, wide, dtype, number), (records,)


def _check_rows(records: Tensor, facts: Facts) -> None:
    """Every rank sees the same records, so every rank raises."""
    high = facts.layer.recipe.gather == "high"
    sizes = amax_of(records.view(facts.wide), 1) if high else _factors(records, facts.geometry)
    wrong = (~torch.isfinite(sizes)).nonzero()
    if len(wrong):
        row, padded = int(wrong[0, 0]), facts.geometry.rows
        raise InvalidArgument(
            f"stowage: weight {facts.layer.name} must be finite, got inf or NaN in row "
            f"{row % padded} of rank {row // padded}"
        )


@torch.library.custom_op("stowage::read_after", mutates_args=())
def _read_after(value: Tensor, after: Tensor) -> Tensor:
    """A copy of what `value` holds once `after` has been computed: a compiler may not read it
    before, though a gather fills it without being a writer that the compiler knows of."""
    return value.clone()


@_read_after.register_fake
def _(value: Tensor, after: Tensor) -> Tensor:
    return torch.empty_like(value)

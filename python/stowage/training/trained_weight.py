# SPDX-License-Identifier: Apache-2.0
"""The weight of a float8 linear layer: high precision where it rests and is trained.

A wrapper around the plain values. Optimizers, views, copies and files see an ordinary tensor; every
write is counted (`Stamp`), so that a scale cannot outlive the values it was made of. F.linear and
FSDP2's gather know it: operands.py, gathered_weight.py.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stowage._ops import _torch
from stowage._ops._torch import tree_iter, tree_map
from stowage._ops.errors import InvalidArgument
from stowage._ops.storage import Identity
from stowage.training import delayed_scales, gathered_weight
from stowage.training.gathered_weight import Float8Weight
from stowage.training.layers import Layer, Stamp
from stowage.training.recipes import amax_of, row_scales, tensor_scale
from stowage.training.scaled_product import Cast, cast

aten = torch.ops.aten
_COPIES = {aten.clone.default, aten._to_copy.default, aten._pin_memory.default}
_NEW = {aten.new_zeros.default, aten.new_empty.default, aten.empty_like.default}


class TrainedWeight(Float8Weight):
    """A trainable weight [rows, columns] of fp32, bf16 or fp16 that products see as fp8.

    `convert_float8` makes it.

    Args:
        value: the values [rows, columns] in high precision.
        layer: the name, recipe and module of the parameter.
        stamp: counts the writes of all that share the memory.
        padded: rows that FSDP2 gives each rank, where they are more than there are here.
        number: a scalar, that of the layer, which compiled graphs of delayed scaling need.
        requires_grad: as of any tensor.

    Example:
        >>> stowage.training.convert_float8(model)
        >>> weight = model[0].weight
        >>> isinstance(weight, stowage.training.TrainedWeight), weight.dtype, weight.travels
        (True, torch.float32, 'f8_e4m3')
    """

    _value: Tensor
    _stamp: Stamp
    _padded: int | None  # rows that FSDP2 gives each rank, where they are more than there are here

    @staticmethod
    def __new__(
        cls,
        value: Tensor,
        layer: Layer,
        stamp: Stamp | None = None,
        padded: int | None = None,
        number: Tensor | None = None,
        requires_grad: bool = False,
    ) -> "TrainedWeight":
        self: TrainedWeight = _torch.make_wrapper_subclass(
            cls,
            value.shape,
            strides=value.stride(),
            storage_offset=value.storage_offset(),
            dtype=value.dtype,
            device=value.device,
            requires_grad=requires_grad,
        )
        self._value, self._layer, self._padded = value, layer, padded
        self._stamp = Stamp() if stamp is None else stamp
        self._number = number
        return self

    def _like(self, value: Tensor, stamp: Stamp | None, padded: int | None) -> "TrainedWeight":
        return TrainedWeight(value, self._layer, stamp, padded, self._number)

    @property
    def plain_value(self) -> Tensor:
        """The values in high precision, in the same shape and memory: what files hold."""
        return self._value

    def storage(self) -> Identity:
        """That of the values: writers of files ask for it, to see what is tied.

        Returns:
            What identifies the memory.
        """
        storage = self._value.untyped_storage()
        return Identity(storage.data_ptr(), storage.nbytes() // self.itemsize)

    def data_ptr(self) -> int:
        """Where the values lie. A write there is not counted, as none that torch does not see.

        Returns:
            The address: bytes from the beginning of memory.
        """
        return self._value.data_ptr()

    @property
    def travels(self) -> str:
        """What FSDP2 gathers, as a storage."""
        return gathered_weight.storage_of(self._layer.recipe).name

    # --- what products see --------------------------------------------------------------------

    def fresh_scale(self) -> Tensor:
        """The scale of the whole tensor, over all ranks; refreshes all scales if one is stale.

        Where rows have their own scales it only says that the values have been found finite.

        Returns:
            An fp32 scalar that multiplies before the cast.
        """
        if torch.compiler.is_compiling():
            if self._number is not None:
                found: Tensor = torch.ops.stowage.delayed_weight_scale(self._number)
                return found.to(self._value.device)
            # part of the graph, from the values of each call
            return tensor_scale(amax_of(self._value), self._layer.recipe)
        scale = self._stamp.fresh_scale()
        if scale is None:
            self._layer.roster.refresh()
            scale = self._stamp.fresh_scale()
        if scale is None:  # a copy of the weight that no module holds
            scale = tensor_scale(amax_of(self._value), self._layer.recipe)
        return scale.to(self._value.device)

    def cast(self, scale: Tensor | None = None, after: Tensor | None = None) -> Cast:
        """The values as fp8 codes.

        Args:
            scale: the scalar that they are multiplied by; without, the scale that is due.
            after: a scalar, unused here; the gathered weight waits for it.

        Returns:
            Codes, and the factor that reads them.
        """
        recipe = self._layer.recipe
        if recipe.rows and not self._layer.cuts_rows:
            return cast(self._value, row_scales(self._value, recipe), recipe.forward)
        return cast(self._value, self.fresh_scale() if scale is None else scale, recipe.forward)

    # --- FSDP2 --------------------------------------------------------------------------------

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        """uint8 [padded rows, bytes of a row], and what all ranks know already."""
        self._layer.roster.before_gather()
        rows = self.shape[0] if self._padded is None else self._padded
        layer, scale = self._layer, None
        if not layer.recipe.rows or layer.parallel:
            scale = self.fresh_scale()
        records, geometry = gathered_weight.encode(self, scale, rows)
        if layer.recipe.rows:  # they travel in the records, which are plain values perhaps
            high = layer.cuts_rows and layer.recipe.gather == "high"
            scale = layer.row_scales if high else None
        facts = gathered_weight.Facts(self._layer, scale, geometry, self.dtype, self._number)
        return (records,), facts

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], facts: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """What FSDP2 gathered, as the weight that layers compute with."""
        return gathered_weight.receive(outputs[0], facts, dtype, out)

    # --- protocols of torch -------------------------------------------------------------------

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"TrainedWeight({self._layer.name}, {self._layer.recipe.name}, {self._value})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = ["_value"] if self._number is None else ["_value", "_number"]
        return names, (self._layer, self._padded)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, size: Sequence[int], stride: Sequence[int]
    ) -> "TrainedWeight":
        layer, padded = context
        return TrainedWeight(inner["_value"], layer, None, padded, inner.get("_number"))

    def __deepcopy__(self, memo: dict[int, Any]) -> "TrainedWeight":
        if id(self) in memo:
            return memo[id(self)]
        layer = copy.deepcopy(self._layer, memo)
        result = weight_of(self._value.detach().clone(), layer, self._padded)
        memo[id(self)] = result
        result.requires_grad_(self.requires_grad)
        if isinstance(self, nn.Parameter):
            _torch.mark_parameter(result)
        if self.grad is not None:
            result.grad = copy.deepcopy(self.grad, memo)
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Files hold the plain values, so that they need no class of ours."""
        plain: Tensor = self._value.detach()
        if isinstance(self, nn.Parameter):
            plain = torch.nn.Parameter(plain, self.requires_grad)
        return plain.__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        plain_args, plain_kwargs = tree_map(_plain, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        if _torch.schema(func).is_mutable:
            return _written(func, args, kwargs, result)
        source = args[0] if args else None
        if type(source) is not TrainedWeight:
            return result
        if func.is_view or func is aten._unsafe_view.default:  # a write through it counts, too
            return tree_map(lambda t: _alias(func, source, args, t), result)
        if func in _COPIES and result.dtype == source.dtype:
            stamp = source._stamp.copied()
            return source._like(result, stamp, source._padded)
        if func in _NEW and result.dtype == source.dtype:
            padded = result.shape[0] if func is aten.new_zeros.default and result.dim() else None
            return source._like(result, None, padded)
        return result


def _plain(x: Any) -> Any:
    if type(x) is TrainedWeight:
        return x._value
    return x.dequantize() if type(x) is gathered_weight.GatheredWeight else x


def _alias(func: Any, source: TrainedWeight, args: tuple[Any, ...], result: Any) -> Any:
    if not isinstance(result, Tensor):
        return result
    same_rows = func is not aten.slice.Tensor or len(args) < 2 or args[1] == 0
    padded = source._padded if same_rows and "split" not in _torch.schema(func).name else None
    return source._like(result, source._stamp, padded)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """Counts the write, and gives back what the caller gave, not the plain values in it."""
    given: dict[int, TrainedWeight] = {}
    for place, argument in enumerate(_torch.schema(func).arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        for x in tree_iter(value):
            if type(x) is TrainedWeight:
                x._stamp.writes += 1
                given[id(x._value)] = x
    return tree_map(lambda t: given.get(id(t), t), result)


def weight_of(value: Tensor, layer: Layer, padded: int | None = None) -> TrainedWeight:
    """A trained weight around a parameter's values. Raises InvalidArgument."""
    if value.dtype not in (torch.float32, torch.bfloat16, torch.float16) or value.dim() != 2:
        raise InvalidArgument(
            f"stowage: {layer.name} must be a matrix of float32, bfloat16 or float16, got "
            f"{value.dtype} {list(value.shape)}"
        )
    number = delayed_scales.number_of(layer) if layer.recipe.delayed else None
    return TrainedWeight(value, layer, padded=padded, number=number)


@torch.library.custom_op("stowage::delayed_weight_scale", mutates_args=())
def _delayed_weight_scale(layer: Tensor) -> Tensor:
    """Opaque to the compiler: all scales are refreshed if the weight has been written to."""
    resting, _ = delayed_scales.layer_of(layer).resting(TrainedWeight)
    return resting.fresh_scale().clone()


@_delayed_weight_scale.register_fake
def _(layer: Tensor) -> Tensor:
    return layer.new_empty((), dtype=torch.float32)

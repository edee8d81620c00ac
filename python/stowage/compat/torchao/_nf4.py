# SPDX-License-Identifier: Apache-2.0
"""torchao's NF4 names over a weight that rests as `nf4:torchao`: the same codes and values.

There is one tensor class: an `NF4Tensor` is a StowedTensor of that storage, however it was made. So
copies, slices, products, state dicts and files are those of every stowed weight (docs/compat.md).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from stowage._ops.errors import InvalidArgument
from stowage._tensor import tables
from stowage._tensor.quantize import quantize
from stowage._tensor.stowed import StowedTensor
from stowage._tensor.views import StowedView

# What another rank must be given of a shard; the mean and the table are the same everywhere.
_INNER_TENSOR_NAMES_FOR_SHARDING = ["quantized_scalers", "quantization_factor", "quantized_data"]


def _whole(instance: Any) -> StowedTensor | None:
    """The weight that a tensor is, or that it shows in another shape or transposed, if it rests as
    torchao has it."""
    if isinstance(instance, StowedView) and instance.numel() == instance._weight.numel():
        instance = instance._weight
    if isinstance(instance, StowedTensor) and instance._storage.dialect == "torchao":
        return instance
    return None


class _Kind(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return _whole(instance) is not None

    def __subclasscheck__(cls, other: Any) -> bool:
        return other is cls

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise InvalidArgument(
            "stowage.compat.torchao: an NF4Tensor must be made with to_nf4(tensor), or from parts "
            "with stowage.StowedTensor(parts, 'nf4:torchao:bf16', shape, dtype)"
        )


class NF4Tensor(metaclass=_Kind):
    """What a StowedTensor of storage `nf4:torchao` is an instance of."""

    @staticmethod
    def from_tensor(input_tensor: Tensor, block_size: int, scaler_block_size: int) -> StowedTensor:
        """Raises InvalidArgument for a shape that the blocks do not fill, as torchao does."""
        storage = f"nf4:torchao:block{block_size}:scaler{scaler_block_size}"
        return quantize(input_tensor, storage)

    def get_original_weight(self: Any) -> Tensor:
        """The values; `NF4Tensor.get_original_weight(weight)` is another way to ask for them."""
        values: Tensor = self.get_original_weight()
        return values


def to_nf4(tensor: Tensor, block_size: int = 64, scaler_block_size: int = 256) -> StowedTensor:
    """`tensor`, of one or two dimensions and a multiple of block_size * scaler_block_size elements,
    as an NF4Tensor of its dtype."""
    return NF4Tensor.from_tensor(tensor, block_size, scaler_block_size)


def linear_nf4(input: Tensor, weight: Tensor) -> Tensor:
    """input W^T in the dtype of `input`, with a gradient to it. Raises InvalidArgument where
    `weight` is no NF4Tensor.
    """
    if not isinstance(weight, NF4Tensor):
        raise InvalidArgument(f"linear_nf4: weight must be an NF4Tensor, got {type(weight)}")
    held: Any = weight
    if held.dtype is not input.dtype:
        plain = isinstance(held, StowedView)
        held = held.dequantize(input.dtype) if plain else held._like(dtype=input.dtype)
    return nn.functional.linear(input, held)


class FrozenNF4Linear(nn.Linear):
    """torchtune's frozen linear layer: the weight rests as NF4, a bias stays plain; products are in
    the dtype of the input. `quantization_kwargs` are those of `to_nf4`."""

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **quantization_kwargs: Any,
    ) -> None:
        super().__init__(in_dim, out_dim, bias=bias, device=device, dtype=dtype)
        self.requires_grad_(False)
        made = to_nf4(self.weight, **quantization_kwargs)
        self.weight = nn.Parameter(made, requires_grad=False)

    def forward(self, input: Tensor) -> Tensor:
        result = linear_nf4(input, self.weight)
        return result if self.bias is None else result + self.bias


class NF4WeightOnlyConfig:
    """What `quantize_` takes. torchao's class accepts no arguments; this one does."""

    def __init__(self, block_size: int = 64, scaler_block_size: int = 256) -> None:
        self.block_size, self.scaler_block_size = block_size, scaler_block_size


nf4_weight_only = NF4WeightOnlyConfig


def _is_linear(module: nn.Module, fqn: str) -> bool:
    return isinstance(module, nn.Linear) and type(module.weight) is nn.Parameter


def quantize_(
    model: nn.Module,
    config: Any,
    filter_fn: Callable[[nn.Module, str], bool] | None = _is_linear,
    device: Any = None,
) -> None:
    """Lets the weights of the linear layers, or of the modules that `filter_fn` accepts, rest as
    NF4, in place. Other configurations than NF4WeightOnlyConfig are torchao's, if installed."""
    if not isinstance(config, NF4WeightOnlyConfig):
        return _theirs(model, config, filter_fn, device)
    chosen = [
        module for name, module in model.named_modules() if (filter_fn or _is_linear)(module, name)
    ]
    sizes = config.block_size, config.scaler_block_size
    made = [to_nf4(module.weight.to(device), *sizes) for module in chosen]  # all or none
    for module, weight in zip(chosen, made, strict=True):
        module.weight = nn.Parameter(weight, requires_grad=False)
    return None


def _theirs(model: nn.Module, config: Any, filter_fn: Any, device: Any) -> None:
    try:
        theirs = importlib.import_module("torchao.quantization")
    except ImportError:
        raise InvalidArgument(
            "stowage.compat.torchao: config must be NF4WeightOnlyConfig() where torchao is not "
            f"installed, got {type(config).__name__}; stowage.stow(model, 'int8:row') and "
            "'f8_e4m3:row' are its weight-only storages here"
        ) from None
    theirs.quantize_(model, config, None if filter_fn is _is_linear else filter_fn, device)


def _part(name: str, flat: bool = False) -> property:
    def read(self: Tensor) -> Tensor:
        part = _checked(self, name).parts["codes" if flat else name]
        return part.view(-1) if flat else part

    return property(read)


def _checked(tensor: Any, name: str) -> StowedTensor:
    weight = _whole(tensor)
    if weight is None:
        raise AttributeError(f"{type(tensor).__name__} has no attribute {name!r}: {tensor!r}")
    return weight


def _size(name: str, of: Callable[[StowedTensor], int]) -> property:
    return property(lambda self: of(_checked(self, name)))


def _get_original_weight(self: Any) -> Callable[[], Tensor]:
    _checked(self, "get_original_weight")
    found: Callable[[], Tensor] = self.dequantize
    return found


ATTRIBUTES: dict[str, Any] = {
    "block_size": _size("block_size", lambda w: w._storage.block),
    "n_blocks": _size("n_blocks", lambda w: w.parts["quantized_scalers"].numel()),
    "scaler_block_size": _size("scaler_block_size", lambda w: w._storage.scaler_block),
    "quantized_scalers": _part("quantized_scalers"),
    "quantization_factor": _part("quantization_factor"),
    "scaler_mean": _part("scaler_mean"),
    "quantized_data": _part("quantized_data", flat=True),
    "nf4": _part("nf4"),
    "get_original_weight": property(_get_original_weight),
}
for _kind in (StowedTensor, StowedView):
    for _name, _attribute in ATTRIBUTES.items():
        if not hasattr(_kind, _name):
            setattr(_kind, _name, _attribute)

_to_of_stowage = tables.FUNCTIONS[Tensor.to]


@tables.function(Tensor.to)
def _to(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Who names a dtype gets a plain tensor, for the own dtype too, as from torchao. A parameter
    stays at rest: `module.to(dtype)` asks it in the same words."""
    held = isinstance(self, nn.Parameter) or getattr(self, "_stays", False)
    if _whole(self) is not None and not held:
        named = (*args, kwargs.get("dtype"), kwargs.get("other"))  # a tensor names its own
        if any(getattr(n, "dtype", n) is self.dtype for n in named):
            return self.dequantize().to(*args, **kwargs)
    return _to_of_stowage(self, *args, **kwargs)

# SPDX-License-Identifier: Apache-2.0
"""Torch functions that know stowed weights, above autograd: the hot path, and doors to memory.

Each handler is called as the function it stands for and returns NotImplemented to leave the call
to operators.py. It must do by itself what lies between: autocast, and the choice of gradients.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn import functional as F
from torch.nn.modules.module import register_module_buffer_registration_hook

from stowage._ops import _torch, library
from stowage._ops.errors import Unsupported, translated
from stowage._tensor import autograd, writes
from stowage._tensor.products import linear
from stowage._tensor.products.grouped import by_index, stacked
from stowage._tensor.products.linear import rounds_twice, strides_count
from stowage._tensor.slices import matrix
from stowage._tensor.stowed import MATRIX_DTYPES, Matrix, StowedTensor
from stowage._tensor.tables import function, with_first_weight
from stowage._tensor.views import StowedView

_compiling = torch.compiler.is_compiling
_grad_enabled = torch.is_grad_enabled
_any_autocast = _torch.is_any_autocast_enabled
_unseen, _direct_linear = _torch.unseen, linear.linear_direct
_one_scale, _CPU = linear.linear_one_scale, linear.CPU


def _exporting() -> bool:
    """Export traces above autograd, where the inner tensors of an intermediate are constants."""
    return torch.compiler.is_exporting()


def _autocast(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast asks for on this device, if it is on and takes such an input."""
    device = x.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return None
    if x.dtype not in MATRIX_DTYPES:
        return None
    return torch.get_autocast_dtype(device)


@function(_torch.linear)
def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if type(weight) is not StowedTensor:
        return by_index(input, weight) if bias is None else NotImplemented
    if (matrix := weight._matrix) is None:
        return NotImplemented
    codes, scales, key, rows, exact, dtype, only = matrix
    if bias is not None:
        kind = type(bias)
        if kind is StowedTensor or kind is StowedView:
            if bias.requires_grad:
                return NotImplemented
            bias = bias.dequantize()
        elif not (kind is Parameter or kind is Tensor or _compiling()):
            return NotImplemented  # a kernel gets no memory of a subclass
    if _any_autocast() and (cast := _autocast(input)) is not None:
        if exact and rounds_twice(dtype, cast):
            return NotImplemented
        input = input.to(cast)
        bias = None if bias is None else bias.to(cast)
    elif input.dtype is not dtype:
        return NotImplemented
    if exact and strides_count(input):
        return NotImplemented
    try:
        if not _unseen(input):
            return _seen_linear(input, weight, bias, matrix)
        if _grad_enabled():
            return autograd.linear_unseen(input, codes, scales, key, rows, bias, weight, exact)
        if only is not None:  # as linear_unseen, a frame and an argument less
            if bias is None:
                return _one_scale(_CPU, input, codes, only, key, rows)
            return _one_scale(_CPU, input, codes, only, key, rows, bias)
        return _direct_linear(input, codes, scales, key, rows, bias, exact)
    except RuntimeError as error:
        raise translated(error) from None


def _seen_linear(x: Tensor, weight: StowedTensor, bias: Tensor | None, matrix: Matrix) -> Any:
    """Where a compiler, a mode, a transform, a profiler or another device sees the op."""
    if _compiling() and _exporting():
        return NotImplemented
    codes, scales, key, rows, exact = matrix[:5]
    if _torch.get_tracing_state():  # which records an op, and no autograd Function
        if torch.onnx.is_in_onnx_export():
            raise Unsupported(
                "stowage: ONNX has no operator for weights that rest; export a plain copy of the "
                "model (stowage.unstow)"
            )
        return library.linear(x, codes, scales, key, rows, bias, exact)
    trained = weight if _grad_enabled() and weight.requires_grad else None
    return autograd.linear(x, codes, scales, key, rows, bias, trained, exact)


def _product(x: Tensor, w: StowedTensor, transposed: bool) -> Any:
    """x W^T or x W; w is a matrix."""
    codes, scales, key, rows, exact, dtype, _ = w._matrix  # type: ignore[misc]
    if _any_autocast() and (cast := _autocast(x)) is not None:
        if exact and rounds_twice(dtype, cast):
            return NotImplemented
        x = x.to(cast)
    elif x.dtype is not dtype:
        return NotImplemented
    if exact and strides_count(x):
        return NotImplemented
    trained = w if _grad_enabled() and w.requires_grad else None
    try:
        if transposed:
            return autograd.linear(x, codes, scales, key, rows, None, trained, exact)
        columns = w.shape[1]
        return autograd.linear_grad_input(x, codes, scales, key, columns, trained, exact)
    except RuntimeError as error:
        raise translated(error) from None


@function(torch.matmul, Tensor.matmul, Tensor.__matmul__)
def _matmul(input: Tensor, other: Tensor, **kwargs: Any) -> Any:
    found = matrix(other)
    if found is None or kwargs or type(input) is not Tensor or input.dim() < 1:
        return NotImplemented
    if _compiling() and _exporting():
        return NotImplemented
    if input.shape[-1] != other.shape[0]:
        return NotImplemented
    return _product(input, *found)


@function(torch.mm, Tensor.mm)
def _mm(input: Tensor, mat2: Tensor, **kwargs: Any) -> Any:
    return _matmul(input, mat2, **kwargs) if input.dim() == 2 else NotImplemented


@function(torch.baddbmm, Tensor.baddbmm)
def _baddbmm(
    input: Any, batch1: Any, batch2: Any, *, beta: Any = 1, alpha: Any = 1, out: Any = None
) -> Any:
    """How PEFT adds low-rank factors to a stack: kept as a sum."""
    seen = _compiling() or _torch.transforming()
    found = None if seen or out is not None or beta != 1 else stacked(input)
    if found is None or found[0]._exact:
        return NotImplemented
    from stowage._tensor.products import folded  # not what an import of the package needs

    kept = folded.folded(input, batch1, batch2, alpha)
    return NotImplemented if kept is None else kept


@function(F.embedding)
def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if type(weight) is not StowedTensor or max_norm is not None or sparse:
        return NotImplemented
    if weight.requires_grad or weight._matrix is None or (_compiling() and _exporting()):
        return NotImplemented
    codes, scales, key = weight._matrix[:3]
    try:
        return library.embedding(input, codes, scales, key, weight.shape, weight._dt)
    except RuntimeError as error:
        raise translated(error) from None


# --- parameters that rest are frozen --------------------------------------------------------------


def _thaw(parameter: Any) -> Any:
    """Refuses to train a frozen parameter, whose codes cannot take an optimizer's steps. Not a
    tensor: nn.Parameter(w) asks for the gradient of one, and that is how to look at it."""
    if not isinstance(parameter, StowedTensor) or not isinstance(parameter, nn.Parameter):
        return NotImplemented
    if parameter.requires_grad or parameter._origin is not None or _compiling():
        return NotImplemented
    raise Unsupported(
        "stowage: a parameter that rests must stay frozen, since rounding would swallow the steps "
        "of an optimizer, got requires_grad=True; train an adapter, make it plain with "
        "stowage.unstow(module), or build the model inside stowage.integrations.peft.adapting() "
        "if PEFT copies it (modules_to_save); nn.Parameter(weight) gives one whose gradient can be "
        "looked at"
    )


@function(Tensor.requires_grad_)
def _requires_grad_(self: Tensor, requires_grad: bool = True) -> Any:
    return _thaw(self) if requires_grad else NotImplemented


@function(Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
def _set_requires_grad(self: Tensor, requires_grad: bool) -> Any:
    return _thaw(self) if requires_grad else NotImplemented


@with_first_weight
def _ask_modules_first() -> None:
    """A module with a weight that refuses changes no other: torch asks one after the other."""
    stock = nn.Module.requires_grad_

    @wraps(stock)
    def all_or_none(self: Any, requires_grad: bool = True) -> Any:
        if requires_grad:
            for parameter in self.parameters():
                _thaw(parameter)
        return stock(self, requires_grad)

    nn.Module.requires_grad_ = all_or_none  # type: ignore[method-assign]


# --- buffers --------------------------------------------------------------------------------------


def _keep_buffer(module: nn.Module, name: str, buffer: Any) -> None:
    """A buffer stays stowed under module.to(dtype), however it came there."""
    if type(buffer) is StowedTensor:
        buffer.stay()


with_first_weight(lambda: register_module_buffer_registration_hook(_keep_buffer))


# --- casts that the caller wrote ------------------------------------------------------------------


def _written(cast: Callable[..., Any]) -> Callable[..., Any]:
    """Not one of autocast, which takes exact weights for dense ones: see rounds_by_autocast()."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _any_autocast() or _compiling():
            return NotImplemented
        off = torch.autocast(self.device.type, enabled=False)
        with off, _torch.DisableTorchFunctionSubclass():
            return cast(self, *args, **kwargs)

    return call


for _cast in (Tensor.to, Tensor.half, Tensor.bfloat16, Tensor.type, Tensor.type_as):
    function(_cast)(_written(_cast))


# --- memory that a stowed weight does not have ----------------------------------------------------


@function(_torch.has_compatible_shallow_copy_type)
def _move(held: Tensor, values: Tensor) -> Any:
    """What `Module.to()` and its like ask before they put a Parameter that is made of `values` in
    the place of `held`, which goes on having what others noted on it."""
    if isinstance(held, StowedTensor) and isinstance(values, StowedTensor):
        notes = held._extras()
        values._carried = {name: notes[name] for name in notes if name != _torch.IS_PARAMETER}
    return NotImplemented


@function(Tensor.data.__set__)  # type: ignore[attr-defined]
def _set_data(into: Tensor, values: Tensor) -> Any:
    return writes.set_data(into, values)


@function(Tensor.numpy, Tensor.__array__, Tensor.__dlpack__)
def _no_memory(self: Tensor, *args: Any, **kwargs: Any) -> NoReturn:
    raise Unsupported(
        "stowage: a stowed tensor shares no memory with NumPy or DLPack, since writes there would "
        "be lost; take .dequantize() first"
    )


@function(Tensor.tolist)
def _tolist(self: Any) -> Any:
    return self.dequantize().tolist()


@function(Tensor.data_ptr)
def _data_ptr(self: Tensor) -> int:
    return 0  # as of every wrapper; torch.save knows them by it

# SPDX-License-Identifier: Apache-2.0
"""A stack of experts that rests, and low-rank factors beside it: what `torch.baddbmm` gives.

PEFT adds LoRA to experts so, in each forward. The dense sum would be a stack in the compute dtype;
here it stays a sum: a product with an expert is that with its resting matrix and those with its
factors, and only experts that are used are read.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stowage._ops import _torch
from stowage._ops.errors import InvalidArgument
from stowage._tensor.products.grouped import by_groups

_compiling = torch.compiler.is_compiling


class Unformed(Tensor):
    """A sum that has its terms, and no values of its own."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise InvalidArgument(
            f"stowage: {func} must be given a plain tensor, got a sum with a resting stack below "
            "autograd, where its factors would lose their gradients; take .dequantize() first"
        )


class Folded(Unformed):
    """base + alpha lhs rhs, of a stack [E, O, K] or a matrix of one; nobody makes one by hand.

    Products and indices of dim 0 take the terms one by one; whatever else is asked of it is asked
    of a plain tensor of the sum.

    Args:
        base: a stack at rest, or a matrix or a transposed view of one.
        lhs: [E, O, R], plain.
        rhs: [E, R, K], plain.
        alpha: multiplies their product.

    Raises:
        InvalidArgument: on use, where one of them was written since; where it is written to itself.
    """

    _resting: Tensor
    _factors: tuple[Tensor, Tensor]
    _alpha: float
    _versions: tuple[int, ...]

    @staticmethod
    def __new__(cls, base: Tensor, lhs: Tensor, rhs: Tensor, alpha: float) -> "Folded":
        folded: Folded = _torch.make_wrapper_subclass(
            cls, base.shape, strides=base.stride(), dtype=base.dtype, device=base.device
        )
        folded._resting, folded._factors, folded._alpha = base, (lhs, rhs), alpha
        folded._versions = tuple(map(_version, (base, lhs, rhs)))
        _torch.set_throw_on_mutable_data_ptr(folded)
        return folded

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def terms(self) -> tuple[Tensor, Tensor, Tensor, float]:
        """base, lhs, rhs, alpha."""
        lhs, rhs = self._factors
        if self._versions != tuple(map(_version, (self._resting, lhs, rhs))):
            raise InvalidArgument(
                "stowage: a stack at rest and its factors must stay as they are until their sum is "
                "used, one was written since torch.baddbmm"
            )
        return self._resting, lhs, rhs, self._alpha

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """A plain tensor of the sum, as torch computes it."""
        base, lhs, rhs, alpha = self.terms()
        values: Any = base
        add = torch.baddbmm if base.dim() == 3 else torch.addmm
        made = add(values.dequantize(), lhs, rhs, alpha=alpha)
        return made if dtype is None else made.to(dtype)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in OF_WRAPPERS:
            with _torch.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        handler = _HANDLERS.get(func)
        if handler is not None and not _compiling():
            result = handler(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if _writes(func, args, kwargs):
            raise InvalidArgument(
                f"stowage: {func} must be given a plain tensor to write to, got a sum with a stack "
                "at rest; take .dequantize() first"
            )
        args, kwargs = _torch.tree_map_only(Folded, Folded.dequantize, (args, kwargs))
        return func(*args, **kwargs)


def _writes(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a sum is what the function writes to."""
    name = getattr(func, "__name__", "")
    inplace = (name.endswith("_") and not name.endswith("__")) or name in _WRITERS
    return (inplace and type(args[0]) is Folded) or type(kwargs.get("out")) is Folded


def _version(t: Tensor) -> int:
    return 0 if t.is_inference() else int(_torch.version(t))


def _is_plain(t: Any) -> bool:
    return type(t) in (Tensor, torch.nn.Parameter)


def folded(input: Tensor, batch1: Tensor, batch2: Tensor, alpha: Any) -> Folded | None:
    """The sum with a stack at rest, of factors that fit it; else None."""
    if not _is_plain(batch1) or not _is_plain(batch2) or input.requires_grad:
        return None
    experts, rows, columns = input.shape
    fits = batch1.shape[:2] == (experts, rows) and batch2.shape[::2] == (experts, columns)
    same = {batch1.dtype, batch2.dtype} == {input.dtype} and batch1.device == batch2.device
    if not fits or not same or batch1.shape[2] != batch2.shape[1] or batch1.device != input.device:
        return None
    return Folded(input, batch1, batch2, alpha)


# --- what takes the terms one by one --------------------------------------------------------------

_HANDLERS: dict[Any, Callable[..., Any]] = {}
_SIGNS = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"]
_WRITERS = {"__set__", "__setitem__", *(f"__i{sign}__" for sign in _SIGNS)}
_FACTS = "shape dtype device layout ndim itemsize nbytes is_cpu is_cuda is_xpu is_mps is_meta"
_FACTS += " is_sparse is_sparse_csr is_mkldnn is_quantized is_nested"
OF_WRAPPERS = frozenset(  # what the wrapper says by itself
    {getattr(Tensor, name).__get__ for name in _FACTS.split()}
    | {Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.stride}
    | {Tensor.storage_offset, Tensor.element_size, Tensor.get_device, Tensor.__len__}
    | {Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex, Tensor.is_inference}
)


def _handles(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def enter(handler: Callable[..., Any]) -> Callable[..., Any]:
        _HANDLERS.update(dict.fromkeys(functions, handler))
        return handler

    return enter


@_handles(Tensor.requires_grad.__get__)  # type: ignore[attr-defined]
def _requires_grad(self: Folded) -> bool:
    return any(t.requires_grad for t in self._factors)


@_handles(Tensor.data_ptr)
def _data_ptr(self: Folded) -> int:
    return 0


@_handles(Tensor.__getitem__)
def _getitem(self: Folded, index: Any) -> Any:
    base, lhs, rhs, alpha = self.terms()
    if base.dim() != 3 or type(index) is bool:
        return NotImplemented
    if isinstance(index, Tensor):
        if index.dtype is not torch.int64 or index.dim() > 1:
            return NotImplemented
        if index.dim() == 1:  # an expert for each token
            every = _values(base[index])
            low = [t.index_select(0, index % len(t)) for t in (lhs, rhs)]  # sums in one order
            return torch.baddbmm(every, *low, alpha=alpha)
        index = int(index)
    if type(index) is not int:
        return NotImplemented
    return Folded(base[index], lhs[index], rhs[index], alpha)


def _values(t: Any) -> Tensor:
    return t if _is_plain(t) else t.dequantize()


@_handles(Tensor.select, torch.select)
def _select(input: Folded, dim: int, index: Any) -> Any:
    return _getitem(input, index) if dim in (0, -input.dim()) else NotImplemented


@_handles(Tensor.transpose, torch.transpose, Tensor.swapaxes, torch.swapaxes)
def _transpose(input: Folded, dim0: int, dim1: int) -> Any:
    last = input.dim() - 1
    dims = {dim + last + 1 if dim < 0 else dim for dim in (dim0, dim1)}
    return _turned(input) if dims == {last - 1, last} else NotImplemented


@_handles(Tensor.mT.__get__)  # type: ignore[attr-defined]
def _turned(input: Folded) -> Any:
    base, lhs, rhs, alpha = input.terms()
    return Folded(*(t.transpose(-2, -1) for t in (base, rhs, lhs)), alpha)


@_handles(Tensor.t, torch.t, Tensor.T.__get__)  # type: ignore[attr-defined]
def _turned_matrix(input: Folded) -> Any:
    return _turned(input) if input.dim() == 2 else NotImplemented


@_handles(_torch.linear)
def _linear(input: Tensor, weight: Any, bias: Tensor | None = None) -> Any:
    if type(weight) is not Folded or type(input) is Folded or weight.dim() != 2:
        return NotImplemented
    base, lhs, rhs, alpha = weight.terms()
    low = F.linear(F.linear(input, rhs), lhs)
    return F.linear(input, base, bias).add(low, alpha=alpha)


@_handles(torch.mm, Tensor.mm)
def _mm(input: Tensor, mat2: Any) -> Any:
    return _matmul(input, mat2) if input.dim() == 2 else NotImplemented


@_handles(torch.matmul, Tensor.matmul, Tensor.__matmul__)
def _matmul(input: Tensor, other: Any) -> Any:
    if type(other) is not Folded or type(input) is Folded or other.dim() != 2:
        return NotImplemented
    base, lhs, rhs, alpha = other.terms()
    return (input @ base).add(input @ lhs @ rhs, alpha=alpha)


@_handles(_torch.grouped_mm)
def _grouped_mm(
    left: Tensor,
    right: Any,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    if type(right) is not Folded or type(left) is Folded or offs is None or bias is not None:
        return NotImplemented
    base, lhs, rhs, alpha = right.terms()
    if base.dim() != 3 or left.dim() != 2 or out_dtype not in (None, left.dtype):
        return NotImplemented
    ends = offs.tolist()
    low = by_groups(by_groups(left, lhs, ends, None, False), rhs, ends, None, False)
    return F.grouped_mm(left, base, offs=offs).add(low, alpha=alpha)

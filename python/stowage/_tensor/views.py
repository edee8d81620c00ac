# SPDX-License-Identifier: Apache-2.0
"""Views of stowed weights: StowedView, for those that cannot stay stowed (slices.py).

A StowedView has no values, only its weight and the chain of view ops that leads from it: a read
dequantizes the weight and replays the chain, so it sees later writes; a write goes to the weight
(writes.py). Nothing that indexing or `.data` returns is ever a temporary that swallows writes.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stowage._ops import _torch, library
from stowage._ops.errors import InvalidArgument
from stowage._tensor import tables
from stowage._tensor.stowed import VALUE_DTYPES, StowedTensor, _guard_memory, initialising, wrap

aten = torch.ops.aten


class Step(NamedTuple):
    """One view op of a chain; `item` picks from ops that return several views."""

    op: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    item: int | None = None


Chain = tuple[Step, ...]
TRANSPOSE = Step(aten.t.default, ())


def replay(chain: Chain, values: Tensor) -> Tensor:
    """The view of `values` that the chain describes."""
    for step in chain:
        seen = step.op(values, *step.args, **dict(step.kwargs))
        values = seen if step.item is None else seen[step.item]
    return values


class StowedView(Tensor):
    """A view of a stowed weight: reads give its values, writes requantize it, both at any time.

    Views that cannot rest themselves come so from indexing; nobody makes one by hand.

    Args:
        weight: what it is a view of.
        chain: the view ops that lead here.
        like: a plain tensor of the same size and strides.

    Example:
        >>> weight = stowage.quantize(torch.ones(4, 4), "int8:row")
        >>> view = weight[:, 1]
        >>> view.zero_()
        >>> weight.dequantize()[0].tolist()
        [1.0, 0.0, 1.0, 1.0]
    """

    _weight: StowedTensor
    _chain: Chain

    @staticmethod
    def __new__(cls, weight: StowedTensor, chain: Chain, like: Tensor) -> "StowedView":
        view = _torch.make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=weight.device,
        )
        view._weight, view._chain = weight, chain
        _guard_memory(view)
        return view

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """A plain tensor of the values seen now; one index of dim 0 reads no other.

        Args:
            dtype: what they are cast to; without, the compute dtype of the weight.

        Returns:
            Values in the view's shape, in new memory.
        """
        one = self._alone()
        start = self._weight.dequantize() if one is None else one
        values = replay(self._chain[one is not None :], start)
        return values if dtype is None else values.to(dtype)

    def _alone(self) -> Tensor | None:
        """What the first step of the chain picks, if that is one index of dim 0."""
        step, weight = self._chain[0], self._weight
        if step.op is not aten.select.int or weight._dt not in VALUE_DTYPES:
            return None
        dim, index = step.args
        if dim % weight.dim() or type(index) is not int or initialising(weight):
            return None
        codes, *scales = weight._parts()
        row = torch.full((1,), index % weight.shape[0], device=codes.device)
        kind, shape = weight._storage.key, weight.shape
        return library.embedding(row, codes, scales, kind, shape, weight._dt)[0]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        steps = ".".join(_torch.schema(step.op).name.removeprefix("aten::") for step in self._chain)
        return f"StowedView({list(self.shape)}, {self.dtype}, {steps} of {self._weight!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        weight = copy.deepcopy(self._weight, memo)
        return memo.setdefault(id(self), view_along(weight, self._chain))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dequantize().clone().__reduce_ex__(protocol)  # its own memory, plain

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        # Names of ops, since an OpOverload in the context defeats the compile cache.
        steps = tuple((str(step.op), *step[1:]) for step in self._chain)
        return ["_weight"], (steps, self.storage_offset(), self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Any], context: Any, size: Sequence[int], stride: Sequence[int]
    ) -> "StowedView":
        steps, offset, dtype = context
        chain = tuple(Step(_op_named(name), *rest) for name, *rest in steps)
        like = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        like = torch.as_strided(like, size, stride, offset) if offset else like
        return StowedView(inner["_weight"], chain, like)

    __torch_function__ = StowedTensor.__torch_function__

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return tables.dispatch(func, args, kwargs or {})


PACKED = (StowedTensor, StowedView)
Packed = StowedTensor | StowedView


def _op_named(name: str) -> Any:
    _, packet, overload = name.split(".")
    return getattr(getattr(aten, packet), overload)


def source(t: Packed) -> tuple[StowedTensor, Chain]:
    """The weight that a write to `t` changes, and the chain that leads from there to `t`."""
    weight, chain = (t._weight, t._chain) if isinstance(t, StowedView) else (t, ())
    if weight._root is None:
        return weight, chain
    return weight._root, (*weight._trail, *chain)


def matrix_of(t: Any) -> tuple[StowedTensor, bool] | None:
    """The stowed matrix that `t` is, or whose transpose it is, and which of the two; else None."""
    if type(t) is StowedTensor:
        return (t, False) if t._matrix is not None else None
    if type(t) is StowedView and t._chain == (TRANSPOSE,) and t._weight._matrix is not None:
        return t._weight, True
    return None


def outside_inference(make: Callable[[], Any]) -> Any:
    """Runs `make` so that its views of tensors made outside inference_mode are legal."""
    if not torch.is_inference_mode_enabled():
        return make()
    with torch.inference_mode(False):
        return make()


def share(view: Tensor, of: Tensor) -> Tensor:
    """Tells autograd and functionalization that `view` shares the memory of `of`."""
    _torch.functionalize_unsafe_set(view, of)
    return view


def alias(t: StowedTensor) -> StowedTensor:
    """Another tensor on the same parts: what detach and alias return.

    The inner tensors are the same objects, so that replacing their memory (writes.py) reaches it.
    """

    def make() -> StowedTensor:
        result = wrap(t._parts(), t._storage, t.shape, t._dt, t._exact, offset=t.storage_offset())
        result._root, result._trail, result._origin = t._root, t._trail, t._origin
        if t._prepared is not None:
            result._prepared = t._prepared
        result._of = t if t._of is None else t._of
        if t._plain:
            result._plain = True
        if t._carried is not None:
            result.__dict__.update(t._carried)
            t._carried = None
        share(result, t)
        return result

    return outside_inference(make)


def view_of(op: Any, t: Packed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a view op returns for a stowed tensor: a guarded view, or a list of them."""
    weight, chain = (t._weight, t._chain) if isinstance(t, StowedView) else (t, ())
    if op is aten.as_strided.default:  # it counts from the start of the whole weight
        weight, chain = (weight if weight._root is None else weight._root), ()
        args, kwargs = _from_start(t, weight, *args, **kwargs), {}
    if op in _TRANSPOSES and t.dim() == 2 and _swaps(op, args):
        if chain == (TRANSPOSE,):
            return alias(weight)
        op, args = aten.t.default, ()
    if isinstance(weight, nn.Parameter) and not weight.requires_grad:
        weight = alias(weight)  # module.to() puts another weight into a Parameter's place
    with torch.inference_mode(False):
        steps = (*chain, Step(op, args))
        if not kwargs and _is_common(weight, steps):
            return _view(weight, steps, _seen(tuple(weight.shape), weight._dt, steps), t)
        seen = op(replay(chain, _meta(weight)), *args, **kwargs)
        items = tuple(kwargs.items())
        if isinstance(seen, Tensor):
            return _view(weight, (*chain, Step(op, args, items)), seen, t)
        each = (Step(op, args, items, i) for i in range(len(seen)))
        views = [_view(weight, (*chain, s), v, t) for s, v in zip(each, seen, strict=True)]
    return views


def view_along(weight: StowedTensor, chain: Chain) -> Tensor:
    return _view(weight, chain, replay(chain, _meta(weight)), weight)


def _from_start(
    t: Packed, root: StowedTensor, size: Any, stride: Any, storage_offset: Any = None
) -> tuple[Any, ...]:
    """Arguments of as_strided: without an offset it begins where its tensor does."""
    offset = t.storage_offset() if storage_offset is None else storage_offset
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=False))
    if all(size) and not 0 <= offset <= last < root.numel():
        raise InvalidArgument(
            f"as_strided: a view must stay inside the {root.numel()} elements of its weight, got "
            f"size {list(size)}, stride {list(stride)}, storage_offset {offset}"
        )
    return size, stride, offset


def _meta(weight: StowedTensor) -> Tensor:
    """Without memory, but where `weight` lies in the whole that it may be a slice of."""
    offset = weight.storage_offset()
    if type(offset) is int and not offset:
        return torch.empty(weight.shape, dtype=weight._dt, device="meta")
    start = torch.empty(offset + weight.numel(), dtype=weight._dt, device="meta")
    return start.as_strided(weight.shape, weight.stride(), offset)


def _is_common(weight: StowedTensor, chain: Chain) -> bool:
    """Whether a view of a whole weight is as models ask for it, again and again, and nothing else
    sees the tensors that tell its strides."""
    seen = _torch.len_torch_dispatch_stack() or _torch.functorch_active()
    if seen or weight.storage_offset():
        return False
    return all(
        s.op in _COMMON and not s.kwargs and all(type(a) is int for a in s.args) for s in chain
    )


@functools.lru_cache(4096)
def _seen(shape: tuple[int, ...], dtype: torch.dtype, chain: Chain) -> Tensor:
    return replay(chain, torch.empty(shape, dtype=dtype, device="meta"))


def _view(weight: StowedTensor, chain: Chain, like: Tensor, of: Tensor) -> Tensor:
    return share(StowedView(weight, chain, like), of)


_COMMON = (aten.select.int, aten.t.default, aten.transpose.int)
_TRANSPOSES = (aten.t.default, aten.transpose.int, aten.permute.default, aten.numpy_T.default)


def _swaps(op: Any, args: tuple[Any, ...]) -> bool:
    if op is aten.transpose.int:
        return is_first(args[0], 2) != is_first(args[1], 2) and all(-2 <= d < 2 for d in args[:2])
    if op is aten.permute.default:
        return [d + 2 if d in (-2, -1) else d for d in args[0]] == [1, 0]
    return True


def is_first(dim: int, rank: int) -> bool:
    """Whether `dim` names dim 0 of a tensor that has one. What names no dim, torch refuses."""
    return rank > 0 and dim in (0, -rank)

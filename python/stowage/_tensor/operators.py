# SPDX-License-Identifier: Apache-2.0
"""What operators do with stowed weights, below autograd: moves, copies, slices, joins, products.

An operator that the table lacks dequantizes its stowed arguments, computes, and is counted:
`stowage.fallbacks()`. Operators that write go to writes.py, views to views.py. cat and stack along
dim 0 join codes and scales where scales allow: no value is read and none is rounded again. Their
pieces must agree in storage, compute dtype and exactness; `stack` turns a scale into one for each
piece, tensor into row, row into row2, as taking an index turns them back (slices.py).
"""

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from stowage._ops import _torch, library
from stowage._ops.storage import Storage
from stowage._tensor import writes
from stowage._tensor.products import blocks, linear
from stowage._tensor.products.linear import rounds_by_autocast
from stowage._tensor.slices import matrix, row, row_slice
from stowage._tensor.stowed import VALUE_DTYPES, Matrix, StowedTensor, initialising, wrap
from stowage._tensor.tables import op
from stowage._tensor.views import PACKED, alias, is_first, outside_inference, view_of

aten = torch.ops.aten
counted_fallbacks: Counter[str] = Counter()


def fallbacks(*, clear: bool = False) -> dict[str, int]:
    """How often an operator without a stowed form has dequantized a whole weight in this process.

    Args:
        clear: starts the counts anew.

    Returns:
        The name of each such operator, with its count.

    Example:
        >>> stowage.fallbacks(clear=True)
        >>> torch.sin(stowage.quantize(torch.randn(8, 8), "int8"))
        >>> stowage.fallbacks()
        {'aten.sin.default': 1}
    """
    counted = dict(counted_fallbacks)
    if clear:
        counted_fallbacks.clear()
    return counted


@op()
def _other(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if writes.writes(called):
        return writes.write(called, args, kwargs)
    if _is_composite(called):
        # Composite operators (chunk, reshape, matmul) arrive whole in inference_mode and export.
        result = _decomposed(called, args, kwargs)
        if result is not NotImplemented:
            return result
    if called.is_view and isinstance(args[0], PACKED):
        return view_of(called, args[0], args[1:], kwargs)
    counted_fallbacks[str(called)] += 1
    return called(*blocks.values(args), **blocks.values(kwargs))


@cache
def _is_composite(called: Any) -> bool:
    """Kept, since asking takes as long as a view."""
    return bool(_torch.can_decompose(called)())


def _decomposed(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As torch does it for plain tensors; where somebody traces, as torch traces."""
    key = _torch.DispatchKey.CompositeImplicitAutograd
    if _torch.len_torch_dispatch_stack() or torch.compiler.is_compiling():
        return called.decompose(*args, **kwargs)
    # upsample, lstm and others have a Python twin for tracing, which rounds and checks differently.
    if not _torch.dispatch_has_kernel_for_dispatch_key(called.name(), key):
        return NotImplemented
    return _torch.op_of_key(called)(key, *args, **kwargs)


# --- the same weight in another place or form -----------------------------------------------------


@op(aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def _alias(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return alias(args[0]) if type(args[0]) is StowedTensor else NotImplemented


@op(aten._unsafe_view.default)
def _same_memory(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch calls it no view, and kron writes to its `out` through one."""
    return view_of(aten.view.default, args[0], args[1:], kwargs)


@op(aten.clone.default)
def _clone(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    t = args[0]
    if type(t) is StowedTensor:
        return t._like([part.clone() for part in t._parts()])
    return called(t.dequantize(), **kwargs)


@op(aten._to_copy.default)
def _to_copy(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A Parameter or a buffer stays stowed in another compute dtype, all else becomes plain."""
    t = args[0]
    dtype = kwargs.get("dtype") or t.dtype
    is_held = isinstance(t, nn.Parameter) or getattr(t, "_stays", False)
    if type(t) is not StowedTensor or not (
        dtype == t.dtype
        or (is_held and dtype.is_floating_point and not rounds_by_autocast(t, dtype))
    ):
        kept = {k: v for k, v in kwargs.items() if k != "dtype"}
        # exact=True shows what the dense tensor would: values already rounded to its dtype.
        rounds = type(t) is StowedTensor and t._exact
        values = t.dequantize().to(dtype) if rounds else t.dequantize(dtype)
        return called(values, **kept) if kept else values
    # Parts keep their own dtypes and their one legal layout.
    where = {k: v for k, v in kwargs.items() if k in ("device", "pin_memory", "non_blocking")}
    moved = t._like([called(part, **where) for part in t._parts()], dtype=dtype)
    moved._stays, moved._plain, moved._prepared = t._stays, t._plain, t._prepared
    moved._origin = t._origin and t._origin.at(moved.device)
    return moved


@op(aten._pin_memory.default)
def _pin(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    t = args[0]
    if type(t) is not StowedTensor:
        return NotImplemented
    pinned = t._like([called(part, *args[1:], **kwargs) for part in t._parts()])
    pinned._origin = t._origin
    return pinned


@op(aten.is_pinned.default)
def _is_pinned(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    t = args[0]
    parts = t._parts() if type(t) is StowedTensor else t._weight._parts()
    return all(called(part, *args[1:], **kwargs) for part in parts)


@op(
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
)
def _make(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A plain tensor of that shape, no value read. Module.to_empty() gets a stowed one, and so does
    an asynchronous save of torch's checkpoints, which puts copies of the attributes into it."""
    t = args[0]
    device = kwargs.get("device") or t.device
    for_copies = called is aten.empty_like.default or (
        called is aten.new_empty.default and tuple(args[1]) == tuple(t.shape)
    )
    if for_copies and "device" in kwargs and type(t) is StowedTensor:
        dtype = kwargs.get("dtype") or t._dt
        fresh = t._like([torch.empty_like(p, device=device) for p in t._parts()], dtype=dtype)
        fresh._origin = t._origin and t._origin.unset()
        return fresh
    like = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
    return called(like, *args[1:], **{**kwargs, "device": device})


# --- rows -----------------------------------------------------------------------------------------


@op(aten.slice.Tensor)
def _slice(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = [*args[1:], *(0, None, None, 1)[len(args) - 1 :]]
    t, (dim, first, last, step) = args[0], given
    if type(t) is not StowedTensor or not is_first(dim, t.dim()) or step != 1:
        return NotImplemented
    start, stop, _ = slice(first, last).indices(t.shape[0])
    rows = outside_inference(lambda: row_slice(t, start, max(start, stop)))
    return NotImplemented if rows is None else rows


@op(aten.select.int)
def _select(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    t, dim, index = args
    if type(t) is not StowedTensor or not is_first(dim, t.dim()):
        return NotImplemented
    rows = t.shape[0]
    if not -rows <= index < rows:
        return NotImplemented
    found = outside_inference(lambda: row(t, index % rows))
    return NotImplemented if found is None else found


@op(aten.unbind.int)
def _unbind(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    t, dim = (*args, 0)[:2]
    if type(t) is not StowedTensor or not is_first(dim, t.dim()):
        return NotImplemented
    found = outside_inference(lambda: [row(t, i) for i in range(t.shape[0])])
    return NotImplemented if any(piece is None for piece in found) else found


def _pieces(t: Any, sizes: list[int]) -> Any:
    """Consecutive row slices of these sizes, if all can stay stowed."""
    pieces, first = [], 0
    for size in sizes:
        piece = row_slice(t, first, first + size)
        if piece is None:
            return NotImplemented
        pieces.append(piece)
        first += size
    return pieces


@op(aten.split.Tensor, aten.split_with_sizes.default)
def _split(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    t, sizes, dim = (*args, kwargs.get("dim", 0))[:3]
    if type(t) is not StowedTensor or not is_first(dim, t.dim()):
        return NotImplemented
    if isinstance(sizes, int):
        rows, each = t.shape[0], sizes
        if each <= 0:
            return NotImplemented
        sizes = [min(each, rows - first) for first in range(0, max(rows, 1), each)]
    if sum(sizes) != t.shape[0]:
        return NotImplemented
    return outside_inference(lambda: _pieces(t, list(sizes)))


# --- products -------------------------------------------------------------------------------------


def _matrix(w: StowedTensor) -> Matrix:
    assert w._matrix is not None
    return w._matrix


def _computes(w: StowedTensor, *others: Tensor | None) -> bool:
    """Whether our ops take these: all else goes to stock ops, which have the texts of errors."""
    return all(
        other is None
        or (
            not isinstance(other, PACKED)
            and other.dtype is w._dt
            and not (w._exact and linear.strides_count(other))
        )
        for other in others
    )


@op(aten.linear.default)
def _linear(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, weight, bias = (*args, kwargs.get("bias"))[:3]
    bias, found = blocks.values(bias), matrix(weight)  # a bias may rest as well
    if found is None or not _computes(found[0], x, bias) or x.shape[-1] != weight.shape[1]:
        return NotImplemented
    w, transposed = found
    if not transposed:
        codes, scales, key, rows, exact = _matrix(w)[:5]
        return linear.linear(x, codes, scales, key, rows, bias, exact)
    y = _times(x, w, False)
    return y if bias is None else y + bias


def _times(x: Tensor, w: StowedTensor, transposed: bool) -> Tensor:
    """x W^T, or x W."""
    codes, scales, key, rows, exact = _matrix(w)[:5]
    if transposed:
        return linear.linear(x, codes, scales, key, rows, None, exact)
    return linear.linear_grad_input(x, codes, scales, key, w.shape[1], exact)


@op(aten.mm.default)
def _mm(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    left, right = args
    if left.dim() != 2 or right.dim() != 2 or left.shape[1] != right.shape[0]:
        return NotImplemented
    if (found := matrix(right)) is not None and _computes(found[0], left):
        return _times(left, *found)
    if (found := matrix(left)) is not None and _computes(found[0], right):
        w, transposed = found
        if w._exact:
            return NotImplemented  # the transposed product would round differently
        return _times(right.t(), w, not transposed).t()
    return NotImplemented


@op(aten.addmm.default)
def _addmm(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bias, x, weight = args
    bias, found = blocks.values(bias), matrix(weight)
    if found is None or kwargs.get("alpha", 1) != 1 or kwargs.get("beta", 1) != 1:
        return NotImplemented
    w, transposed = found
    if not _computes(w, x, bias) or x.dim() != 2 or x.shape[1] != weight.shape[0]:
        return NotImplemented
    if transposed and bias.dim() == 1 and bias.shape[0] == w.shape[0]:
        codes, scales, key, rows, exact = _matrix(w)[:5]
        return linear.linear(x, codes, scales, key, rows, bias, exact)
    return _times(x, w, transposed) + bias


@op(aten.embedding.default)
def _embedding(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    w, ids = args[:2]
    if type(w) is not StowedTensor or w.dim() != 2 or w._dt not in VALUE_DTYPES:
        return NotImplemented
    codes, *scales = w._parts()
    return library.embedding(ids, codes, scales, w._storage.key, w.shape, w._dt)


@op(aten.copy_.default)
def _copy(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    into, values = args[:2]
    if writes.same_form(into, values) and not initialising(into):
        return writes.copy_parts(into, values)
    if not isinstance(into, PACKED):  # reading a stowed tensor is what a copy is for
        return called(into, values.dequantize(), *args[2:])
    return NotImplemented


@op(aten.cat.default)
def _cat(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    pieces, dim = (*args, kwargs.get("dim", 0))[:2]
    if (
        not _alike(pieces)
        or not is_first(dim, pieces[0].dim())
        or len({p.shape[1:] for p in pieces}) > 1
    ):
        return NotImplemented
    storage = pieces[0]._storage
    parts = _flat(pieces) if storage.flat else _rows(pieces)
    rows = sum(piece.shape[0] for piece in pieces)
    return _joined(pieces, parts, storage, (rows, *pieces[0].shape[1:]))


@op(aten.stack.default)
def _stack(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    pieces, dim = (*args, kwargs.get("dim", 0))[:2]
    if (
        not _alike(pieces)
        or not is_first(dim, pieces[0].dim() + 1)
        or len({p.shape for p in pieces}) > 1
    ):
        return NotImplemented
    storage, shape = pieces[0]._storage, (len(pieces), *pieces[0].shape)
    if storage.misfit(shape):  # nf4:torchao has no third dimension
        return NotImplemented
    if storage.flat:
        return _joined(pieces, _flat(pieces), storage, shape)
    own = _by_part(pieces)
    if storage.under_one_of_all and not all(map(_same, own[2:])):
        storage = storage.under("row")
    elif storage.outer_kind == "row":
        storage = storage.under("row2")
    elif storage.outer_kind == "row2":
        return NotImplemented
    each = len(own) if storage.kind == "tensor" else storage.in_rows
    stacked, shared = [torch.stack(parts) for parts in own[:each]], _shared(own[each:])
    if shared is None or storage.misfit(shape):
        return NotImplemented
    if storage.kind == "tensor":
        storage = storage.of_kind("row")
    elif storage.kind == "row":
        storage = storage.of_kind("row2")
    elif storage.kind == "row2" or (storage.kind == "block" and shape[-1] % storage.block):
        return NotImplemented
    named = storage.layout(shape)
    parts = [part.reshape(sizes) for part, (_, _, sizes) in zip(stacked, named, strict=False)]
    return _joined(pieces, [*parts, *shared], storage, shape)


def _alike(pieces: Sequence[Any]) -> bool:
    """Whether all rest in the same way, and have rows."""
    if not pieces or any(type(p) is not StowedTensor or not p.dim() for p in pieces):
        return False
    facts = {(p._storage.key, p._dt, p._exact, p.device) for p in pieces}
    return len(facts) == 1


def _by_part(pieces: Sequence[StowedTensor]) -> list[list[Tensor]]:
    """For each part of the storage, that of every piece."""
    return [list(parts) for parts in zip(*(p._parts() for p in pieces), strict=True)]


def _same(parts: Sequence[Tensor]) -> bool:
    """Whether pieces share one scale: they are slices of one weight, or it has equal values."""
    first = parts[0]
    if all(part is first for part in parts):
        return True
    return type(first) is Tensor and not first.is_meta and all(first.equal(p) for p in parts[1:])


def _rows(pieces: Sequence[StowedTensor]) -> list[Tensor] | None:
    """Joined parts of 8-bit codes and casts; None where pieces have different scales for all."""
    storage, parts = pieces[0]._storage, _by_part(pieces)
    if storage.by_columns and len(pieces) > 1:  # groups of the whole would be others
        return None
    shared = _shared(parts[storage.in_rows :])
    if shared is None or any(p.shape[0] % storage.rows_together(p.shape) for p in pieces[:-1]):
        return None
    return [*map(torch.cat, parts[: storage.in_rows]), *shared]


def _shared(parts: Sequence[list[Tensor]]) -> list[Tensor] | None:
    """What all rows of the whole share, if the pieces have it in common."""
    return [part[0].clone() for part in parts] if all(map(_same, parts)) else None


def _flat(pieces: Sequence[StowedTensor]) -> list[Tensor] | None:
    """Joined parts of 4-bit codes; None where a piece but the last ends inside of a block."""
    storage = pieces[0]._storage
    edge = storage.block * (storage.outer or 1)
    if any(piece.numel() % edge for piece in pieces[:-1]):
        return None
    codes, absmax, *rest = _by_part(pieces)
    parts = [torch.cat(codes), torch.cat(absmax)]
    if not storage.nested:
        return parts
    group, *others = rest
    shared = _shared(others)  # each weight has its own offset
    return None if shared is None else [*parts, torch.cat(group), *shared]


def _joined(
    pieces: Sequence[StowedTensor],
    parts: Sequence[Tensor] | None,
    storage: Storage,
    shape: Sequence[int],
) -> Any:
    if parts is None:
        return NotImplemented
    return wrap(parts, storage, shape, pieces[0]._dt, pieces[0]._exact)

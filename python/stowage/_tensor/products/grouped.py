# SPDX-License-Identifier: Apache-2.0
"""Grouped products of expert weights: each group of rows times an expert of its own, which stays
stowed. No other expert is read, and no graph keeps a dequantized one. Compiled graphs, whose shapes
must not depend on values, have one op of ours for all groups; so have devices with kernels that
read the ends themselves, where no gradient is wanted and rows are few."""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stowage._ops import _torch, library
from stowage._ops.composite import grouped_kernels
from stowage._ops.errors import InvalidArgument, fail, translated
from stowage._ops.lenders import fetched, stays_on
from stowage._ops.shapes import check_weight
from stowage._ops.storage import Storage
from stowage._tensor.products.wants import expect, fetch_to, in_file
from stowage._tensor.stowed import Stack, StowedTensor, initialising, lying, wrap
from stowage._tensor.tables import function, op
from stowage._tensor.views import StowedView

aten = torch.ops.aten
_compiling = torch.compiler.is_compiling
_COMPOSITE = library.composite_forced()
_NAMES = ("offs", "bias", "out_dtype")  # of aten::_grouped_mm


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor | Sequence[int],
    bias: Tensor | None = None,
) -> Tensor:
    """Rows of `x`, sorted by expert, each times its expert's matrix.

    The values and gradients are those of F.linear with each expert. In compiled graphs F.grouped_mm
    is the form.

    Args:
        x: [S, K], in the dtype of `weight`.
        weight: [E, O, K], at rest or plain.
        offsets: [E]: where each expert's rows end, ascending, as torch's grouped_mm takes them.
        bias: [E, O], added by expert.

    Returns:
        [S, O]; rows behind the last end are zeros.

    Raises:
        InvalidArgument: shapes, dtypes or ends that do not fit.

    Example:
        >>> experts = stowage.quantize(torch.randn(2, 16, 64), "int8:row2")
        >>> stowage.grouped_linear(torch.randn(5, 64), experts, [2, 5]).shape
        torch.Size([5, 16])
    """
    where = "stowage.grouped_linear"
    if weight.dim() != 3 or x.dim() != 2 or x.shape[1] != weight.shape[2]:
        raise InvalidArgument(
            f"{where}: x must be [S, K] and weight [E, O, K], got {list(x.shape)} and "
            f"{list(weight.shape)}"
        )
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise InvalidArgument(f"{where}: x must be {weight.dtype} like weight, got {x.dtype}")
    if bias is not None and bias.shape != weight.shape[:2]:
        raise InvalidArgument(
            f"{where}: bias must be {list(weight.shape[:2])}, got {list(bias.shape)}"
        )
    ends = offsets.tolist() if isinstance(offsets, Tensor) else list(offsets)
    rising = all(a <= b for a, b in zip([0, *ends], [*ends, len(x)], strict=True))
    if len(ends) != len(weight) or not rising:
        raise InvalidArgument(
            f"{where}: offsets must be {len(weight)} ends that ascend from 0 to {len(x)}, "
            f"got {ends}"
        )
    return by_groups(x, weight, ends, bias, transposed=True)


def by_groups(
    x: Tensor, weight: Tensor, ends: Sequence[int], bias: Tensor | None, transposed: bool
) -> Tensor:
    """x W^T or x W by groups, for plain weights as well."""
    stack = weight._stack if bias is None and type(weight) is StowedTensor else None
    if stack is not None and _is_seen_whole(x, weight):
        return _in_one_op(x, stack, ends, transposed)
    reached = list(accumulate(ends, max, initial=0))
    spans = {e: slice(a, b) for e, (a, b) in enumerate(pairwise(reached)) if b > a}
    used: Sequence[int] = list(spans)
    if in_file(weight):
        expect([weight], used)
    if x.device != weight.device:
        used = fetch_to(x.device, weight, used) or used
    made = {}
    for expert in used:
        rows, w = x[spans[expert]], weight[expert]
        if transposed:
            made[expert] = F.linear(rows, w, None if bias is None else bias[expert])
        else:
            made[expert] = rows @ w
    pieces, start = [made[expert] for expert in spans], reached[-1]
    columns = weight.shape[1] if transposed else weight.shape[2]
    if start < len(x) or not pieces:
        dtype = pieces[0].dtype if pieces else x.dtype
        # Zeros that depend on x, so that its gradient is zeros too and not missing.
        pieces.append(F.pad(x[start:, :0], (0, columns)).to(dtype))
    return torch.cat(pieces)


def by_index(x: Tensor, view: Any) -> Any:
    """x W^T where W is one matrix of a stack by its number, as loops over experts ask for it."""
    if type(view) is not StowedView or (stack := view._weight._stack) is None:
        return NotImplemented
    step, count = view._chain[0], stack[3][0]
    if len(view._chain) != 1 or step.op is not aten.select.int or step.args[0] not in (0, -3):
        return NotImplemented
    if type(step.args[1]) is not int:
        return NotImplemented
    learns = torch.is_grad_enabled() and view.requires_grad
    if learns or not _is_seen_whole(x, view._weight) or x.shape[-1:] != view.shape[1:]:
        return NotImplemented
    expert, rows = step.args[1] % count, math.prod(x.shape[:-1])
    ends = [0] * expert + [rows] * (count - expert)
    y = _in_one_op(x.reshape(rows, x.shape[-1]), stack, ends, True)
    return y.view(*x.shape[:-1], y.shape[1])


def _in_one_op(x: Tensor, stack: Stack, ends: Sequence[int], transposed: bool) -> Tensor:
    try:
        y: Tensor = library.grouped_rows(x, *stack, list(ends), transposed)
    except RuntimeError as error:
        raise translated(error) from None
    return y


def _is_seen_whole(x: Tensor, weight: Any) -> bool:
    """Whether nobody sees the products one by one."""
    if not _torch.unseen(x) or x.dtype is not weight._dt or initialising(weight) or _COMPOSITE:
        return False
    learns = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return not learns and not torch.is_autocast_enabled("cpu")


def stacked(t: Any) -> tuple[StowedTensor, bool] | None:
    """The stowed [E, O, K] that `t` is, or whose matrices it shows transposed, and which."""
    if type(t) not in (StowedTensor, StowedView) or t.dim() != 3:
        return None
    weight, chain = (t._weight, t._chain) if type(t) is StowedView else (t, ())
    for step in chain:
        if step.op is not aten.transpose.int or {d % 3 for d in step.args} != {1, 2}:
            return None
    if weight._storage.transposed:
        return lying(weight), len(chain) % 2 == 0
    return weight, len(chain) % 2 == 1


def _found(
    left: Any, right: Any, offs: Any, bias: Any, out_dtype: torch.dtype | None
) -> tuple[StowedTensor, bool] | None:
    """The experts of a grouped product that goes group by group, and whether they are transposed;
    else None."""
    found = stacked(right)
    if found is None or offs is None or bias is not None:
        return None
    weight = found[0]
    if isinstance(left, StowedTensor | StowedView) or left.dim() != 2:
        return None
    fits = left.dtype is weight.dtype and left.shape[1] == right.shape[1]
    return found if fits and out_dtype in (None, weight.dtype) else None


@function(_torch.grouped_mm)
def _grouped_mm(
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """What F.grouped_mm, and transformers' experts by it, call."""
    if _compiling() or type(left) is not Tensor:
        return NotImplemented
    found = _found(left, right, offs, bias, out_dtype)
    if found is None or offs is None:
        return NotImplemented
    weight, transposed = found
    if transposed and _without_ends(left, weight):
        codes, *scales = weight._parts()
        return grouped(
            left, codes, scales, weight._storage.key, weight.shape, offs, True, weight._exact
        )
    return by_groups(left, weight, offs.tolist(), None, transposed)


def _without_ends(x: Tensor, weight: StowedTensor) -> bool:
    """Whether a kernel multiplies all groups, and nobody needs to know here where they end."""
    learns = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    there = weight._parts()[0].device == x.device and not _torch.transforming()
    if learns or not there:
        return False
    return grouped_kernels(x, weight._storage, weight.shape, weight._exact) is not None


# --- in compiled graphs: below autograd, whose formula comes back here for the gradient ----------


_WHERE = "stowage::_grouped_linear"


def _check(x: Tensor, shape: Sequence[int], offsets: Tensor, transposed: bool) -> None:
    fits = len(shape) == 3 and x.dim() == 2 and offsets.dim() == 1
    if not fits or x.shape[1] != shape[2 if transposed else 1] or len(offsets) != shape[0]:
        fail(
            "invalid_argument",
            f"{_WHERE}: x [S, K], offsets [E] and a weight [E, O, K] or [E, K, O] must fit, got "
            f"{list(x.shape)}, {list(offsets.shape)} and {list(shape)}",
        )


def _by_groups(
    x: Tensor,
    codes: Tensor,
    scales: Sequence[Tensor],
    storage: int,
    shape: Sequence[int],
    offsets: Tensor,
    transposed: bool,
    exact: bool,
) -> Tensor:
    kind = Storage.from_key(storage)
    _check(x, shape, offsets, transposed)
    check_weight(_WHERE, kind, shape, codes, scales, x.dtype)
    whole = codes.device == x.device or stays_on(x.device, codes)  # else matrices come one by one
    if whole and transposed and (kernels := grouped_kernels(x, kind, shape, exact)) is not None:
        with fetched([codes, *scales], x.device) as parts:
            return kernels.grouped_linear(x, tuple(parts), kind, shape, offsets)
    ends: list[int] = offsets.tolist()
    if not all(0 <= a <= b <= len(x) for a, b in pairwise([0, *ends])):
        fail("invalid_argument", f"{_WHERE}: offsets must ascend from 0 to {len(x)}, got {ends}")
    weight = wrap([codes, *scales], kind, tuple(shape), x.dtype, exact)
    with torch.no_grad():
        return by_groups(x, weight, ends, None, transposed)


def _fake(
    x: Tensor,
    codes: Tensor,
    scales: Any,
    storage: int,
    shape: Any,
    offsets: Any,
    transposed: bool,
    _: bool,
) -> Tensor:
    _check(x, shape, offsets, transposed)
    return x.new_empty((x.shape[0], shape[1] if transposed else shape[2]))


def _register() -> torch.library.Library:
    library = torch.library.Library("stowage", "FRAGMENT")
    library.define(
        "_grouped_linear(Tensor x, Tensor codes, Tensor[] scales, int storage, int[] shape, "
        "Tensor offsets, bool transposed, bool exact) -> Tensor"
    )
    library.impl("_grouped_linear", _by_groups, "CompositeExplicitAutograd")
    torch.library.register_fake("stowage::_grouped_linear", _fake, lib=library)
    return library


_registered = _register()
grouped = torch.ops.stowage._grouped_linear.default


@op(aten._grouped_mm.default)
def _below(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = [*args, None, None, None][:5]
    given[2:] = [kwargs.get(n, g) for n, g in zip(_NAMES, given[2:], strict=True)]
    found = _found(*given)
    if found is None:
        return NotImplemented
    (weight, transposed), offsets = found, given[2]
    codes, *scales = weight._parts()
    key, exact = weight._storage.key, weight._exact
    return grouped(given[0], codes, scales, key, weight.shape, offsets, transposed, exact)

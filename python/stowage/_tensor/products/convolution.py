# SPDX-License-Identifier: Apache-2.0
"""Convolutions with a resting weight of more than a tile, as two ops of ours.

Each result channel needs all source channels of its group and the weights between them. So the
result is made some channels at a time (of dim 0 of the weight, or of dim 1 where the convolution is
transposed), and no sum is cut. The gradient to the input is the other of the two.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from stowage._ops import _torch
from stowage._ops.errors import fail
from stowage._ops.lenders import where_x_is
from stowage._tensor.products import blocks
from stowage._tensor.products.tiles import TILE, Resting, needs_tiles, resting, spans
from stowage._tensor.stowed import StowedTensor
from stowage._tensor.tables import op
from stowage._tensor.views import PACKED

aten = torch.ops.aten
_LEAST_CHANNELS = 32  # fewer make a convolution slow: then pieces of the result may exceed a tile
_LARGEST = 1 << 40  # of a stride, padding or dilation: sums of sizes with it are numbers of 64 bits
_ARGUMENTS = (
    "Tensor codes, Tensor[] scales, int storage, int[] shape, {}SymInt[] stride, SymInt[] padding, "
    "SymInt[] dilation, bool transposed, SymInt[] output_padding, int groups) -> Tensor"
)


class ConvOptions(NamedTuple):
    """The trailing arguments of aten::convolution, in its order."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int


class _Piece(NamedTuple):
    """Some result channels: what they are made of."""

    source: slice  # of channels
    result: slice
    groups: int
    rows: range  # of the weight
    columns: range | None  # all

    def widen(self, w: Resting) -> Tensor:
        if self.columns is None:
            return w.rows(self.rows.start, self.rows.stop)
        return w.columns(self.rows, self.columns.start, self.columns.stop)


def _pieces(w: Resting, groups: int, by_rows: bool, channel_bytes: int) -> Iterator[_Piece]:
    """Result channels are the rows of the weight, or else its columns; a result channel takes
    `channel_bytes` beside its share of the weight."""
    rows, columns = w.shape[0] // groups, w.shape[1]
    sources, results = (columns, rows) if by_rows else (rows, columns)
    share = sources * w.column_bytes
    if rows * w.row_bytes <= TILE:  # whole groups
        for a, b in spans(groups, results * (share + channel_bytes)):
            take, put = slice(a * sources, b * sources), slice(a * results, b * results)
            yield _Piece(take, put, b - a, range(a * rows, b * rows), None)
        return
    room = TILE if by_rows else TILE * 3 // 4
    room = min(room, max(room // (share + channel_bytes), _LEAST_CHANNELS) * share)
    for group in range(groups):
        take, row, to = (
            slice(group * sources, (group + 1) * sources),
            group * rows,
            group * results,
        )
        for a, b in spans(results, share, room):
            of = range(row + a, row + b) if by_rows else range(row, row + rows)
            yield _Piece(take, slice(to + a, to + b), 1, of, None if by_rows else range(a, b))


def _channel_bytes(result: Tensor) -> int:
    return math.prod((result.shape[0], *result.shape[2:])) * result.element_size()


@where_x_is()
def _convolution(
    x: Tensor,
    codes: Tensor,
    scales: Sequence[Tensor],
    storage: int,
    shape: Sequence[int],
    bias: Tensor | None,
    *options: Any,
) -> Tensor:
    w, given = Resting(codes, scales, storage, shape, x.dtype), ConvOptions(*options)
    y = _like_stock(x, shape, bias, given)
    for piece in _pieces(w, given.groups, not given.transposed, _channel_bytes(y)):
        part = None if bias is None else bias[piece.result]
        sizes = (*given[:-1], piece.groups)
        # No name for the pieces: they would live on beside the next ones.
        y[:, piece.result].copy_(aten.convolution(x[:, piece.source], piece.widen(w), part, *sizes))
    return y


def _check(x: Tensor, shape: Sequence[int], bias: Tensor | None, given: ConvOptions) -> None:
    """What torch's own shape function takes for granted, and what pieces of channels would hide."""
    spatial, groups = len(shape) - 2, given.groups
    sizes = (given.stride, given.padding, given.dilation, given.output_padding)
    if spatial < 1 or x.dim() != len(shape) or groups < 1 or shape[0] % groups:
        _fail(
            "x and weight must be of one rank, of 3 or more, and groups at least 1 and divide the "
            f"weight's rows, got {list(x.shape)}, {list(shape)} and {groups}"
        )
    channels = (shape[0], shape[1] * groups)
    results, sources = reversed(channels) if given.transposed else channels
    if x.shape[1] != sources:
        _fail(f"x must have {sources} channels, got {list(x.shape)}")
    if bias is not None and tuple(bias.shape) != (results,):
        _fail(f"the bias must be [{results}], got {list(bias.shape)}")
    if any(len(each) not in (1, spatial) for each in sizes):
        _fail(
            f"stride, padding, dilation and output_padding must be 1 or {spatial} numbers, got "
            f"{[list(each) for each in sizes]}"
        )
    if not all(0 <= n < _LARGEST for each in sizes for n in each):
        _fail(
            "stride, padding, dilation and output_padding must be at least 0 and below 2**40, got "
            f"{[list(each) for each in sizes]}"
        )


def _fail(what: str) -> NoReturn:
    fail("invalid_argument", f"stowage::_convolution: {what}")


def _stock_shape(
    x: Tensor, shape: Sequence[int], bias: Tensor | None, given: ConvOptions
) -> torch.Size:
    """Of the result of the dense convolution."""
    _check(x, shape, bias, given)
    where, weight = (torch.empty(tuple(s), dtype=x.dtype, device="meta") for s in (x.shape, shape))
    seen: Tensor = aten.convolution(
        where, weight, None if bias is None else bias.to("meta"), *given
    )
    return seen.shape


def _like_stock(x: Tensor, shape: Sequence[int], bias: Tensor | None, given: ConvOptions) -> Tensor:
    """An empty tensor of the shape and memory format of the dense convolution."""
    form = _torch.suggest_memory_format(x)
    made = _stock_shape(x, shape, bias, given)
    return torch.empty(made, dtype=x.dtype, device=x.device, memory_format=form)


@where_x_is(at=2)
def _grad_input(
    g: Tensor,
    x: Tensor,
    codes: Tensor,
    scales: Sequence[Tensor],
    storage: int,
    shape: Sequence[int],
    *options: Any,
) -> Tensor:
    w, given = Resting(codes, scales, storage, shape, g.dtype), ConvOptions(*options)
    if g.shape != (wanted := _stock_shape(x, shape, None, given)):
        _fail(f"g must be {list(wanted)} like the result, got {list(g.shape)}")
    gx = torch.empty_like(x)
    for piece in _pieces(w, given.groups, given.transposed, _channel_bytes(gx)):
        sizes = (*given[:-1], piece.groups)
        gx[:, piece.result].copy_(
            aten.convolution_backward(
                g[:, piece.source],
                x[:, piece.result],
                piece.widen(w),
                None,
                *sizes,
                [True, False, False],
            )[0]
        )
    return gx


def _fake(
    x: Tensor,
    codes: Tensor,
    scales: Sequence[Tensor],
    storage: int,
    shape: Sequence[int],
    bias: Tensor | None,
    *options: Any,
) -> Tensor:
    return _like_stock(x, shape, bias, ConvOptions(*options))


def _fake_grad_input(g: Tensor, x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x)


def _register() -> torch.library.Library:
    library = torch.library.Library("stowage", "FRAGMENT")
    library.define("_convolution(Tensor x, " + _ARGUMENTS.format("Tensor? bias, "))
    library.define("_convolution_grad_input(Tensor g, Tensor x, " + _ARGUMENTS.format(""))
    for name, run, fake in (
        ("_convolution", _convolution, _fake),
        ("_convolution_grad_input", _grad_input, _fake_grad_input),
    ):
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"stowage::{name}", fake, lib=library)
    return library


_registered = _register()
convolution = torch.ops.stowage._convolution.default
grad_input = torch.ops.stowage._convolution_grad_input.default


# --- what convolutions of stowed weights are, below autograd --------------------------------------


def _takes(w: Any, *others: Any) -> bool:
    return (
        type(w) is StowedTensor
        and needs_tiles(w)
        and all(type(t) not in PACKED and t.dtype is w._dt for t in others if t is not None)
    )


@op(aten.convolution.default)
def _forward(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Autograd keeps the stowed weight and comes to `_backward`."""
    if kwargs or len(args) != 9 or not _takes(args[1], args[0], args[2]):
        return called(*blocks.values(args), **blocks.values(kwargs))
    x, weight, bias, *options = args
    w = resting(weight)
    return convolution(x, w.codes, w.scales, w.storage, w.shape, bias, *options)


@op(aten.convolution_backward.default)
def _backward(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 11 or args[10][1] or not _takes(args[2], *args[:2]):
        gx, gw, gb = called(*blocks.values(args), **blocks.values(kwargs))
        return gx, None if gw is None else gw.to(args[2].device), gb
    g, x, weight, _, *options, (need_x, _, need_bias) = args
    w, gx, gb = resting(weight), None, None
    if need_x:
        gx = grad_input(g, x, w.codes, w.scales, w.storage, w.shape, *options)
    if need_bias:
        gb = g.sum([d for d in range(g.dim()) if d != 1])
    return gx, None, gb

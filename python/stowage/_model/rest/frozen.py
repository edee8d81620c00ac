# SPDX-License-Identifier: Apache-2.0
"""`stowage.frozen_linear`: a linear layer that rests from the start, made by blocks of rows."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from stowage._ops import library
from stowage._ops.errors import InvalidArgument, translated
from stowage._ops.numbers import four_bit, scaled, torchao
from stowage._ops.storage import Storage
from stowage._tensor.stowed import wrap

_PIECE = 1 << 20  # elements that are plain at once
Draw = Callable[[int], Tensor]  # the next rows, [n, columns]


def frozen_linear(
    in_features: int,
    out_features: int,
    storage: str | Storage = "nf4",
    bias: bool = True,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    *,
    exact: bool = False,
) -> nn.Linear:
    """An nn.Linear that rests from the start: no float copy of its weight is ever held.

    Only a block of rows, about 2^20 values, is plain at a time. On the CPU the values are those of
    `stowage.quantize(nn.Linear(...).weight, storage)` and of its bias after the same seed, bit for
    bit; other devices draw from the same distribution. The parameters are frozen.

    Args:
        in_features: columns of the weight.
        out_features: rows of the weight.
        storage: how the weight rests.
        bias: whether there is one; it stays plain.
        device: where; on "meta" nothing is drawn, `to_empty` and `load_state_dict` fill it.
        dtype: the compute dtype; without, torch's default.
        exact: as in `stowage.quantize`.

    Returns:
        The layer.

    Raises:
        InvalidArgument: an unknown storage, or sizes that the storage cannot hold.

    Example:
        >>> layer = stowage.frozen_linear(4096, 512, "nf4", bias=False)
        >>> stowage.nbytes(layer) / layer.weight.numel()  # half a byte, and a scale for 64 values
        0.5625
    """
    layer = nn.Linear(in_features, out_features, bias, device="meta", dtype=dtype)
    kind = Storage(storage).for_values(layer.weight.dtype)
    # Where random values come to: to meta in a factory that `load` calls.
    where = torch.rand(0, device=device).device
    compute, shape = layer.weight.dtype, (out_features, in_features)
    if rule := kind.misfit(shape):
        raise InvalidArgument(f"stowage.frozen_linear: {rule}, got {list(shape)}")
    bound = _bound(in_features)

    def draw(rows: int) -> Tensor:
        piece = torch.empty((rows, in_features), dtype=compute, device=where)
        return piece.uniform_(-bound, bound)

    with torch.no_grad():
        parts = [torch.empty(s, dtype=d, device=where) for _, d, s in kind.layout(shape)]
        if where.type != "meta":
            try:
                _fill(parts, kind, shape, draw)
            except RuntimeError as error:
                raise translated(error) from None
        layer.weight = nn.Parameter(wrap(parts, kind, shape, compute, exact), False)
        if bias:
            values = torch.empty(out_features, dtype=compute, device=where)
            edge = 1 / math.sqrt(in_features) if in_features else 0
            layer.bias = nn.Parameter(values.uniform_(-edge, edge), requires_grad=False)
    return layer


def _bound(columns: int) -> float:
    """Of the uniform distribution from which nn.Linear draws its weight, to the last bit."""
    gain = nn.init.calculate_gain("leaky_relu", math.sqrt(5))
    return math.sqrt(3.0) * (gain / math.sqrt(columns)) if columns else 0.0


def _spans(storage: Storage, shape: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Rows [first, last) of each piece; none ends inside of a 4-bit block."""
    rows, columns = shape
    step = storage.rows_together(shape)
    if storage.flat:
        step = storage.block // math.gcd(storage.block, columns)
    each = max(_PIECE // max(columns, 1) // step, 1) * step
    for first in range(0, rows if columns else 0, each):
        yield first, min(first + each, rows)


def _fill(parts: list[Tensor], storage: Storage, shape: tuple[int, int], draw: Draw) -> None:
    if storage.dialect == "torchao":
        return _fill_torchao(parts, storage, shape, draw)
    if storage.flat:
        return _fill_blocks(parts, storage, shape, draw)
    scale = zero = outer = None
    if storage.kind == "tensor":
        ends = _reach(parts, storage, shape, draw)
        row = nn.functional.pad(ends, (0, max(storage.together - 2, 0)))  # zeros change no scale
        made = library.quantize(row[None], storage.key)
        for into, part in zip(parts[1:], made[1:], strict=True):
            into.copy_(part)
        scale = scaled.numbers(parts[1], storage)
        zero = scaled.moved_by(parts[2], scale, storage) if storage.zero else None
    elif storage.under_one_of_all:
        largest = _reach(parts, storage, shape, draw).abs().amax()
        outer = parts[2].copy_(scaled.outer_of(largest, storage))
    for first, last in _spans(storage, shape):
        values = draw(last - first)
        if scale is not None:
            parts[0][first:last] = scaled.encode(values.to(torch.float32), scale, storage, zero)
            continue
        if outer is None:
            fresh = library.quantize(values, storage.key)
        else:
            fresh = scaled.quantize_groups(values, storage, outer)
        if storage.by_columns:  # of all rows
            for into, part in zip(parts, fresh, strict=True):
                into.copy_(part)
            continue
        for into, part in zip(parts[: storage.in_rows], fresh, strict=False):
            each = 1 if into is parts[0] else storage.rows or 1
            into[first // each : -(-last // each)] = part


def _reach(parts: list[Tensor], storage: Storage, shape: tuple[int, int], draw: Draw) -> Tensor:
    """The least of all values and the largest, from a first draw of all pieces, after which the
    generator stands where it stood."""
    device = parts[0].device
    others = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(others, device_type="cuda" if not others else device.type):
        reach = torch.zeros(2, device=device)  # the least value and the largest
        for first, last in _spans(storage, shape):
            lo, hi = draw(last - first).float().aminmax()
            reach = torch.stack([torch.minimum(reach[0], lo), torch.maximum(reach[1], hi)])
    return reach


def _fill_blocks(parts: list[Tensor], storage: Storage, shape: tuple[int, int], draw: Draw) -> None:
    """Codes come from the plain scales of their blocks, which are nested when all are there."""
    codes, absmax, *_ = parts
    plain = Storage(f"{storage.codes}:block{storage.block}")
    scales = torch.empty_like(absmax, dtype=torch.float32) if storage.nested else absmax
    for first, last in _spans(storage, shape):
        start, block = first * shape[1], storage.block
        piece, largest = library.quantize(draw(last - first), plain.key)
        codes[start // 2 : start // 2 + len(piece)] = piece
        scales[start // block : start // block + len(largest)] = largest
    if storage.nested:
        for into, part in zip(parts[1:], four_bit.nest(scales), strict=True):
            into.copy_(part)


def _fill_torchao(
    parts: list[Tensor], storage: Storage, shape: tuple[int, int], draw: Draw
) -> None:
    """Likewise; zeros behind a piece make up whole scaler blocks, which codes do not depend on."""
    codes, block = parts[0], storage.block
    scales = torch.empty(len(parts[1]), dtype=torchao.work(storage), device=codes.device)
    for first, last in _spans(storage, shape):
        start, piece = first * shape[1], draw(last - first).view(-1)
        count = piece.numel()
        largest = torchao.as_type(piece, storage).view(-1, block).abs().amax(1)
        scales[start // block : start // block + len(largest)] = largest
        whole = nn.functional.pad(piece, (0, -count % (block * storage.scaler_block)))
        codes[start // 2 : (start + count) // 2] = library.quantize(whole, storage.key)[0][
            : count // 2
        ]
    for into, part in zip(parts[1:], torchao.nest(scales, storage), strict=True):
        into.copy_(part)

# SPDX-License-Identifier: Apache-2.0
"""Every op on weights by stock torch ops, for devices and machines that we have no kernel for.

Slower, the same numbers: quantize, dequantize and embedding give the bytes of the kernels, linear
computes in fp32 and rounds once. On the CPU they stand in when STOWAGE_FORCE_ISA=composite.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from stowage._ops import library as ops
from stowage._ops.device_kernels import MOST_ROWS, DeviceKernels, kernels_of
from stowage._ops.errors import fail
from stowage._ops.lenders import lender_of, where_x_is
from stowage._ops.library import composite_forced
from stowage._ops.numbers import rounding, scaled
from stowage._ops.numbers import rounding as magnitudes
from stowage._ops.numbers.worst import BlockErrors
from stowage._ops.shapes import (
    check_amax,
    check_embedding,
    check_linear,
    check_linear_grad_input,
    check_measure,
    check_quantize,
    check_weight,
)
from stowage._ops.storage import Storage

_SUBNORMAL, _ONE = 2.0**-1074, 1.0


def _check_subnormals(where: str) -> None:
    # The kernels clear the flush mode for their duration; here nothing can, and codes would differ.
    if _SUBNORMAL * _ONE == 0.0:
        fail("unsupported", f"{where}: needs torch.set_flush_denormal(False), got True")


def quantize(x: Tensor, storage: int, keep_nonfinite: bool = False) -> list[Tensor]:
    kind = Storage.from_key(storage).for_values(x.dtype)
    check_quantize(x, kind)
    if (kernels := kernels_of(x.device, kind)) is not None:
        made = kernels.quantize(x, kind, keep_nonfinite)
        if made is not None:
            return made  # else what is not finite is named below
    _check_subnormals("stowage::quantize")
    return scaled.quantize(x, kind, keep_nonfinite)


def dequantize(
    codes: Tensor, scales: Sequence[Tensor], storage: int, shape: Sequence[int], out: torch.dtype
) -> Tensor:
    where, kind = "stowage::dequantize", Storage.from_key(storage)
    check_weight(where, kind, shape, codes, scales, out)
    if (kernels := kernels_of(codes.device, kind)) is not None:
        return kernels.dequantize((codes, *scales), kind, shape, out)
    _check_subnormals(where)
    result = torch.empty(tuple(shape), dtype=out, device=codes.device)
    if codes.dtype == out:  # a plain cast in its own type
        return result.copy_(codes)
    rows, length = rounding.rows_of(shape), rounding.row_elements(shape)
    if result.numel():
        flat = result.view(rows, length)
        for span in rounding.spans(rows, length):
            values = scaled.values((codes, *scales), kind, shape, span)
            flat[span].copy_(rounding.round_once(values, out))
    return result


def _tile(
    parts: Sequence[Tensor], storage: Storage, shape: Sequence[int], rows: slice, dtype: torch.dtype
) -> Tensor:
    """fp32 values of some rows, rounded to the compute dtype as the kernels' are."""
    return scaled.values(parts, storage, shape, rows).to(dtype).to(torch.float32)


def _check_exact(where: str, x: Tensor) -> None:
    if x.dtype == torch.bfloat16 and x.is_cpu:
        fail("unsupported", f"{where}: exact bf16 products need the kernels, got composite")


def _dense(
    codes: Tensor, scales: Sequence[Tensor], storage: int, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """The weight, for torch's own product; codes that are values are it, without a copy."""
    if codes.dtype == dtype:
        return codes
    return dequantize(codes, scales, storage, shape, dtype)


@where_x_is()
def linear(
    x: Tensor,
    codes: Tensor,
    scales: Sequence[Tensor],
    storage: int,
    rows: int,
    bias: Tensor | None,
    exact: bool = False,
) -> Tensor:
    where, kind = "stowage::linear", Storage.from_key(storage)
    shape = check_linear(x, codes, scales, kind, rows, bias)
    if (kernels := kernels_of(x.device, kind)) is not None:
        if not exact and kernels.takes(x, kind, shape):
            return kernels.linear(x, (codes, *scales), kind, shape, bias)
        weight = _dense(codes, scales, storage, shape, x.dtype)
        return torch.nn.functional.linear(x, weight, bias)
    _check_subnormals(where)
    if exact:
        _check_exact(where, x)
        weight = _dense(codes, scales, storage, shape, x.dtype)
        return torch.nn.functional.linear(x, weight, bias)
    out = torch.empty((*x.shape[:-1], rows), dtype=x.dtype, device=x.device)
    wide, flat = x.reshape(-1, shape[1]).to(torch.float32), out.view(-1, rows)
    for span in rounding.spans(rows, shape[1]):
        tile = _tile((codes, *scales), kind, shape, span, x.dtype)
        term = None if bias is None else bias[span].to(torch.float32)
        flat[:, span].copy_(torch.nn.functional.linear(wide, tile, term))
    return out


def grouped_kernels(
    x: Tensor, storage: Storage, shape: Sequence[int], exact: bool
) -> DeviceKernels | None:
    """What multiplies x [S, K] by matrices [E, O, K] on its device and waits for no end of a group;
    None where nothing does, or where so many rows are better off with dequantized matrices."""
    few = len(x) <= MOST_ROWS * shape[0] and x.dtype is not torch.float64
    if exact or storage.transposed or not few:
        return None
    return kernels_of(x.device, storage)


@where_x_is()
def linear_grad_input(
    g: Tensor,
    codes: Tensor,
    scales: Sequence[Tensor],
    storage: int,
    columns: int,
    exact: bool = False,
) -> Tensor:
    where, kind = "stowage::linear_grad_input", Storage.from_key(storage)
    shape = check_linear_grad_input(g, codes, scales, kind, columns)
    wide = g.reshape(-1, shape[0])
    on_device = kernels_of(g.device, kind) is not None
    if not on_device:
        _check_subnormals(where)
    if exact or on_device:
        _check_exact(where, g)
        gx = wide.mm(_dense(codes, scales, storage, shape, g.dtype))
        return gx.view(*g.shape[:-1], columns)
    wide = wide.to(torch.float32)
    total = torch.zeros((wide.shape[0], columns), dtype=torch.float32, device=g.device)
    for span in rounding.spans(shape[0], columns):
        total.addmm_(wide[:, span], _tile((codes, *scales), kind, shape, span, g.dtype))
    return total.to(g.dtype).view(*g.shape[:-1], columns)


def embedding(
    ids: Tensor,
    codes: Tensor,
    scales: Sequence[Tensor],
    storage: int,
    shape: Sequence[int],
    out: torch.dtype,
    tile: bool = False,
) -> Tensor:
    where, kind = "stowage::embedding", Storage.from_key(storage)
    if ids.device != codes.device and lender_of(codes, ids.device) is not None:
        rows = ops.embedding(ids.to(codes.device), codes, scales, storage, shape, out, tile)
        return rows.to(ids.device)  # a table is not fetched: its rows are
    check_embedding(ids, codes, scales, kind, shape, out)
    if (kernels := kernels_of(codes.device, kind)) is not None:
        made = kernels.embedding(ids, (codes, *scales), kind, shape, out)
        if made is not None:
            return made  # else the id is named below
    _check_subnormals(where)
    rows, length = shape[0], rounding.row_elements(shape)
    flat = ids.reshape(-1).to(torch.int64)
    result = torch.empty((*ids.shape, *shape[1:]), dtype=out, device=codes.device)
    if not flat.numel():
        return result
    low, high = (int(v) for v in torch.aminmax(flat))
    if low < 0 or high >= rows:
        wrong = low if low < 0 else high
        fail("out_of_range", f"{where}: ids must be in [0, {rows}), got {wrong}")
    lines = result.view(-1, length) if length else result
    for span in rounding.spans(flat.numel() if length else 0, length):
        values = scaled.pick((codes, *scales), kind, shape, flat[span])
        lines[span].copy_(rounding.round_once(values, out))
    return result


def amax(values: Sequence[Tensor]) -> Tensor:
    check_amax(values)
    if values and (kernels := kernels_of(values[0].device)) is not None:
        return kernels.amax(values)
    _check_subnormals("stowage::amax")
    return magnitudes.amaxes(values)


@where_x_is()
def measure(x: Tensor, codes: Tensor, scales: Sequence[Tensor], storage: int) -> Tensor:
    kind = Storage.from_key(storage)
    check_measure(x, codes, scales, kind)
    _check_subnormals("stowage::measure")
    if kind.transposed:  # blocks are those of what lies
        return measure(x.transpose(1, 2).contiguous(), codes, scales, kind.lying.key)
    totals = torch.zeros(6, dtype=torch.float64)
    totals[0] = x.numel()
    rows, length = rounding.rows_of(x.shape), rounding.row_elements(x.shape)
    flat = x.reshape(rows, length) if x.numel() else x
    blocks = BlockErrors(kind, x.shape)
    for span in rounding.spans(rows if length else 0, length):
        # Cast to fp64 on the CPU: some devices have none.
        value = flat[span].to("cpu", torch.float64)
        rest = scaled.values((codes, *scales), kind, x.shape, span).to("cpu", torch.float64)
        finite = torch.isfinite(value) & torch.isfinite(rest)
        value = torch.where(finite, value, 0.0)
        if kind.kind == "none":
            totals[1] += (value.abs() > kind.largest).sum()
        totals[2] += (~finite).sum()
        error = torch.where(finite, (value - rest).abs(), 0.0)
        totals[3] = torch.maximum(totals[3], error.amax())
        totals[4] += error.square().sum()
        totals[5] += value.square().sum()
        blocks.add(span.start * length, error, value)
    return torch.cat([totals, blocks.worst()])


@where_x_is()
def _linear(
    x: Tensor, codes: Tensor, scale: Tensor, storage: int, rows: int, bias: Tensor | None = None
) -> Tensor:
    return linear(x, codes, [scale], storage, rows, bias)


_OPS = {
    "_linear": _linear,
    "quantize": quantize,
    "dequantize": dequantize,
    "linear": linear,
    "linear_grad_input": linear_grad_input,
    "embedding": embedding,
    "amax": amax,
    "measure": measure,
}


def _register() -> torch.library.Library:
    # Below the op, so that graphs and gradients are the same. A key for one device (CPU: ours)
    # goes before this one for all.
    library = torch.library.Library("stowage", "IMPL")
    for name, function in _OPS.items():
        library.impl(name, function, "CompositeExplicitAutograd")
        if composite_forced():
            library.impl(name, function, "CPU", allow_override=True)
    return library


_registered = _register()

# SPDX-License-Identifier: Apache-2.0
"""What our products count in torch.utils.flop_counter: as much as their dense twins."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import conv_flop_count, register_flop_formula

from stowage._tensor.products import convolution, grouped  # noqa: F401  they define ops

_ops = torch.ops.stowage
Shape = Sequence[int]


def _elements(shape: Shape) -> int:
    return torch.Size(shape).numel()


@register_flop_formula([_ops.linear, _ops._linear])
def _linear(
    x: Shape, codes: Shape, scales: Any, storage: int, rows: int, *_: Any, **__: Any
) -> int:
    return 2 * _elements(x) * rows


@register_flop_formula(_ops.linear_grad_input)
def _linear_grad_input(
    g: Shape, codes: Shape, scales: Any, storage: int, columns: int, *_: Any, **__: Any
) -> int:
    return 2 * _elements(g) * columns


@register_flop_formula(_ops._convolution)
def _convolution(
    x: Shape, codes: Shape, scales: Any, storage: int, shape: Shape, *rest: Any, out_shape: Shape
) -> int:
    """`rest`: bias, stride, padding, dilation, transposed, output_padding, groups."""
    return int(conv_flop_count(list(x), list(shape), list(out_shape), transposed=rest[4]))


@register_flop_formula(_ops._convolution_grad_input)
def _convolution_grad_input(
    g: Shape,
    x: Shape,
    codes: Shape,
    scales: Any,
    storage: int,
    shape: Shape,
    *rest: Any,
    out_shape: Shape,
) -> int:
    """`rest`: stride, padding, dilation, transposed, output_padding, groups. As torch counts it:
    the other of the two convolutions, of g."""
    turned = [shape[1], shape[0], *shape[2:]]
    return int(conv_flop_count(list(g), turned, list(out_shape), transposed=not rest[3]))


@register_flop_formula([_ops._grouped_linear, _ops.grouped_rows])
def _grouped_linear(
    x: Shape, codes: Shape, scales: Any, storage: int, shape: Shape, *_: Any, **__: Any
) -> int:
    """As if every row had an expert: how many have depends on values."""
    return 2 * x[0] * shape[1] * shape[2]

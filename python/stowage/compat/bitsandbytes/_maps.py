# SPDX-License-Identifier: Apache-2.0
"""Tables of 8-bit codes: the dynamic map of Dettmers et al., "8-bit optimizers via block-wise
quantization" (2021), whose decades have ever more linear fractions."""

from __future__ import annotations

import torch
from torch import Tensor

from stowage._ops.errors import InvalidArgument
from stowage._ops.numbers.four_bit import nested_map


def create_dynamic_map(
    signed: bool = True, max_exponent_bits: int = 7, total_bits: int = 8
) -> Tensor:
    """The 256 ascending values of 8-bit codes, fp32; fewer bits are filled up with zeros. The one
    of the defaults, for block scales, is a constant; others vary in the last place with the build
    of torch, as those of bitsandbytes do. Raises InvalidArgument where fractions do not fill the
    bits."""
    if (signed, max_exponent_bits, total_bits) == (True, 7, 8):
        return nested_map(torch.device("cpu")).clone()
    fraction_bits = total_bits - 1 - max_exponent_bits
    decades = [
        _middles(int(2.0 ** (decade + fraction_bits + (not signed))))
        * 10.0 ** (decade - max_exponent_bits + 1)
        for decade in range(max_exponent_bits)
    ]
    decades.append(_middles(int(2.0**fraction_bits) - 1))
    positive = torch.cat(decades)
    values = torch.cat([positive, -positive if signed else positive[:0], torch.tensor([0.0, 1.0])])
    if values.numel() != 2**total_bits or total_bits > 8:
        raise InvalidArgument(
            f"create_dynamic_map: max_exponent_bits and total_bits must give 2**total_bits values, "
            f"at most 256, got {max_exponent_bits} and {total_bits}, which give {values.numel()}"
        )
    return torch.nn.functional.pad(values, (0, 256 - values.numel())).sort().values


def _middles(count: int) -> Tensor:
    """Of as many equal parts of [0.1, 1]."""
    if count <= 0:
        return torch.empty(0)
    edges = torch.linspace(0.1, 1, count + 1, dtype=torch.float32)
    return (edges[:-1] + edges[1:]) / 2.0

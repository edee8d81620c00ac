# SPDX-License-Identifier: Apache-2.0
"""Codes of float8 beside fp32: by torch's casts, and in integers on devices that lack the types."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

_LACKING = {"mps"}  # types of devices


class _Format(NamedTuple):
    dtype: torch.dtype
    mantissa: int  # bits
    bias: int
    infinity: int  # its code; NaN's, where there is none


FORMATS = {
    "f8_e4m3": _Format(torch.float8_e4m3fn, 3, 7, 0x7F),
    "f8_e5m2": _Format(torch.float8_e5m2, 2, 15, 0x7C),
}


def encoded(v: Tensor, codes: str) -> Tensor:
    """The nearest codes, uint8, of two as near the even one. v: fp32, no number in it beyond the
    largest of the format."""
    if v.device.type not in _LACKING:
        return v.to(FORMATS[codes].dtype).view(torch.uint8)
    return in_integers(v, FORMATS[codes])


def decoded(codes: Tensor, name: str) -> Tensor:
    """fp32 values of uint8 codes."""
    if codes.device.type not in _LACKING:
        return codes.view(FORMATS[name].dtype).to(torch.float32)
    return _values(name, codes.device)[codes.to(torch.int32)]


@cache
def _values(name: str, device: torch.device) -> Tensor:
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    return every.view(FORMATS[name].dtype).to(torch.float32).to(device)


def in_integers(v: Tensor, form: _Format) -> Tensor:
    """As encoded(). Bits that go are rounded by adding just less than half of what remains, and the
    last bit that does; the grid of subnormal codes is that of integers."""
    bits = v.contiguous().view(torch.int32)
    magnitude, gone = bits & 0x7FFFFFFF, 23 - form.mantissa
    rounded = magnitude + ((1 << (gone - 1)) - 1) + ((magnitude >> gone) & 1)
    normal = (rounded >> gone) - ((127 - form.bias) << form.mantissa)
    least = 2.0 ** (1 - form.bias)
    small = (v.abs().clamp(max=least) * (2.0**form.mantissa / least)).round().to(torch.int32)
    code = torch.where(v.abs() < least, small, normal)
    code = torch.where(torch.isinf(v), form.infinity, torch.where(torch.isnan(v), 0x7F, code))
    return (code | ((bits >> 24) & 0x80)).to(torch.uint8)

# SPDX-License-Identifier: Apache-2.0
"""A matrix as OpenVINO keeps it compressed: a constant, converted and multiplied by scales."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from torch import Tensor

import stowage

GROUPS = {"u8": 0, "f8e4m3": 0, "nf4": 64, "i4": 32}  # 0: a scale for each row


def u8_codes(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Around a zero of 128."""
    scales = np.abs(values).max(-1, keepdims=True) / 127
    return (np.rint(values / scales) + 128).astype(np.uint8), scales


def i4_codes(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scales = np.abs(values).max(-1, keepdims=True) / 7
    codes = np.rint(values / scales).astype(np.int8).view(np.uint8) & 15
    return low_half_first(codes), scales


def low_half_first(codes: np.ndarray) -> np.ndarray:
    flat = codes.reshape(-1)
    joined: np.ndarray = (flat[0::2] | flat[1::2] << 4).astype(np.uint8)
    return joined


def nf4_codes(w: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Those of bitsandbytes, whose halves of a byte stand the other way."""
    parts = stowage.quantize(w, "nf4").parts
    packed, absmax = (parts[name].numpy().reshape(-1) for name in ("codes", "absmax"))
    return (packed >> 4 | packed << 4).astype(np.uint8), absmax


def f8_codes(w: Tensor) -> tuple[np.ndarray, np.ndarray]:
    parts = stowage.quantize(w, "f8_e4m3:row").parts
    return parts["codes"].numpy().view(np.uint8), parts["scale"].numpy()


def coded(w: Tensor, kind: str) -> tuple[np.ndarray, np.ndarray]:
    values = w.float().numpy()
    if kind == "u8":
        return u8_codes(values)
    if kind == "i4":
        return i4_codes(values.reshape(w.shape[0], -1, GROUPS[kind]))
    return nf4_codes(w) if kind == "nf4" else f8_codes(w)


class Compiled:
    """x is fp32; codes and f16 scales stay compressed where the plugin has a product for them."""

    def __init__(self, w: Tensor, kind: str, threads: int) -> None:
        rows, columns = w.shape
        group = GROUPS[kind]
        shape = [rows, columns // group, group] if group else [rows, columns]
        codes, scales = coded(w, kind)
        self.rest_bytes = codes.nbytes + scales.size * 2
        held = ops.constant(ov.Tensor(codes, ov.Shape(shape), getattr(ov.Type, kind)))
        value: Any = ops.convert(held, "f16")
        zero: Any = np.full(1, 128, np.uint8)
        if kind == "u8":
            one = ops.constant(ov.Tensor(zero, ov.Shape([1, 1]), ov.Type.u8))
            value = ops.subtract(value, ops.convert(one, "f16"))
        kept: Any = scales.reshape([*shape[:-1], 1]).astype(np.float16)
        value = ops.multiply(value, ops.constant(kept))
        if group:
            value = ops.reshape(value, np.array([rows, columns], np.int64), False)
        x = ops.parameter([-1, columns], np.float32)
        product = ops.matmul(x, ops.convert(value, "f32"), False, True)
        self._arrays = (codes, zero, kept)  # not copied, and read when x is first seen
        options = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": "1"}
        self.model = ov.Core().compile_model(ov.Model([product], [x]), "CPU", options)
        self._request = self.model.create_infer_request()
        self.product(np.zeros((1, columns), np.float32))
        self.widened = not self._compressed()
        if self.widened:
            self.rest_bytes = 4 * rows * columns

    def _compressed(self) -> bool:
        """Whether its product reads codes: where it has none for them it keeps fp32 instead."""
        facts = [op.get_rt_info() for op in self.model.get_runtime_model().get_ordered_ops()]
        told = [
            of["runtimePrecision"].astype(str)
            for of in facts
            if of["layerType"].astype(str) in ("FullyConnected", "MatMul")
        ]
        return bool(told) and not {"f32", "bf16", "f16"} & set(told)

    def product(self, x: np.ndarray) -> np.ndarray:
        result: np.ndarray = self._request.infer({0: x}, share_inputs=True, share_outputs=True)[0]
        return result

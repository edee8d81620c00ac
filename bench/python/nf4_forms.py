# SPDX-License-Identifier: Apache-2.0
"""One bf16 matrix as NF4 in every form that people keep it in: ours, bitsandbytes', torchao's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F

import stowage

OURS = {"nf4": "nf4", "nested": "nf4:block64:nested", "torchao form": "nf4:torchao"}
Call = Callable[[], Any]


@dataclass(frozen=True)
class Form:
    """A weight as somebody keeps it."""

    name: str
    quantize: Call | None  # from the bf16 matrix
    values: Call | None  # bf16
    linear: Callable[[Tensor], Tensor]
    trains: bool = True  # gradients pass to the input
    rest_bytes: int = 0


def dense(w: Tensor) -> list[Form]:
    return [Form("dense bf16", None, w.clone, lambda x: F.linear(x, w), rest_bytes=w.nbytes)]


def ours(w: Tensor) -> list[Form]:
    def form(name: str, storage: str) -> Form:
        resting = stowage.quantize(w, storage)
        return Form(
            name,
            lambda: stowage.quantize(w, storage),
            resting.dequantize,
            lambda x: F.linear(x, resting),
            rest_bytes=resting.nbytes_at_rest,
        )

    return [form(name, storage) for name, storage in OURS.items()]


def bitsandbytes(w: Tensor) -> list[Form]:
    """Its two products: by dequantizing, and the fused one of layers in eval mode, for which it
    rearranges the weight."""
    import bitsandbytes as bnb
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    packed, state = quantize_4bit(w, quant_type="nf4", compress_statistics=False)
    layer = bnb.nn.Linear4bit(
        w.shape[1],
        w.shape[0],
        bias=False,
        compute_dtype=w.dtype,
        compress_statistics=False,
        quant_type="nf4",
    )
    layer.weight = bnb.nn.Params4bit(
        w.clone(), requires_grad=False, compress_statistics=False, quant_type="nf4"
    )
    layer = layer.to("cpu").eval()
    return [
        Form(
            "bitsandbytes",
            lambda: quantize_4bit(w, quant_type="nf4", compress_statistics=False),
            lambda: dequantize_4bit(packed, state),
            lambda x: bnb.matmul_4bit(x, packed.t(), quant_state=state),
            rest_bytes=packed.nbytes + state.absmax.nbytes,
        ),
        Form("bitsandbytes fused", None, None, layer, trains=False),
    ]


def torchao(w: Tensor) -> list[Form]:
    from torchao.quantization.quantize_.workflows.nf4 import nf4_tensor as nf4

    held = nf4.to_nf4(w, 64, 256)
    return [
        Form(
            "torchao",
            lambda: nf4.to_nf4(w, 64, 256),
            held.get_original_weight,
            lambda x: nf4.linear_nf4(x, held),
            rest_bytes=held.quantized_data.nbytes + held.quantized_scalers.nbytes,
        )
    ]


def forms(w: Tensor, peers: bool) -> list[Form]:
    made = dense(w) + ours(w)
    for peer in (bitsandbytes, torchao) if peers else ():
        try:
            made += peer(w)
        except ImportError as error:
            print(f"{peer.__name__}: left out, {error}", file=sys.stderr)
    return made

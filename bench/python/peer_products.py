# SPDX-License-Identifier: Apache-2.0
"""One bf16 matrix as other libraries keep it, and products with it: for bench/python/peers.py.

Each product is made by a function of its own, which imports its library itself and raises where it
is missing or cannot. `x` says which dtype a product takes: x is bf16 where the library has that.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stowage

OURS = {"f8_e4m3:row": "8 bits", "int8:row": "8 bits", "nf4": "4 bits",
        "int4:block32:bf16": "4 bits", "mxfp4": "4 bits"}  # fmt: skip


class Unfit(Exception):
    """A library that has no such product, and why."""


@dataclass
class Product:
    group: str  # what it is compared with: 8 bits, 4 bits, dense
    rest_bytes: int
    call: Callable[[Any], Any]
    x: str = "bf16"
    feed: Callable[[Tensor], Any] = lambda x: x  # from bf16 to what call takes: not timed
    values: Callable[[Any], Tensor] = lambda y: y
    note: str | None = None


Maker = Callable[[Tensor, int], Product]  # of the weight and a number of threads


# --- ours and torch's -----------------------------------------------------------------------------


def ours(storage: str) -> Maker:
    def make(w: Tensor, threads: int) -> Product:
        resting = stowage.quantize(w, storage)
        return Product(OURS[storage], resting.nbytes_at_rest, lambda x: F.linear(x, resting))

    return make


def dense(w: Tensor, threads: int) -> Product:
    held = w.clone()
    return Product("dense", held.nbytes, lambda x: F.linear(x, held))


def dense_fp32(w: Tensor, threads: int) -> Product:
    held = w.float()
    call = lambda x: F.linear(x, held)  # noqa: E731
    return Product("dense", held.nbytes, call, "fp32", lambda x: x.float())


def int8pack(w: Tensor, threads: int) -> Product:
    scales = w.float().abs().amax(1) / 127
    codes = (w.float() / scales[:, None]).round().to(torch.int8)
    kept = scales.to(w.dtype)
    size = codes.nbytes + kept.nbytes
    return Product("8 bits", size, lambda x: torch._weight_int8pack_mm(x, codes, kept))


def int4pack(w: Tensor, threads: int, group: int = 32) -> Product:
    """Groups of a scale and of a number for code 8, in bf16."""
    groups = w.float().unflatten(1, (-1, group))
    scales = groups.abs().amax(2, keepdim=True) / 7
    codes = ((groups / scales).round() + 8).flatten(1).to(torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    numbers = torch.cat([scales, torch.zeros_like(scales)], 2).transpose(0, 1)
    kept = numbers.contiguous().to(w.dtype)
    product = torch.ops.aten._weight_int4pack_mm_for_cpu
    call = lambda x: product(x, packed, group, kept)  # noqa: E731
    return Product("4 bits", packed.nbytes + kept.nbytes, call)


# --- libraries on torch ---------------------------------------------------------------------------


def linear_of(w: Tensor) -> nn.Linear:
    layer = nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=w.dtype)
    with torch.no_grad():
        layer.weight.copy_(w)
    return layer.eval().requires_grad_(False)


def torchao(compiled: bool) -> Maker:
    def make(w: Tensor, threads: int) -> Product:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        layer = linear_of(w)
        quantize_(layer, Int8WeightOnlyConfig())
        call = torch.compile(layer, dynamic=False) if compiled else layer
        return Product("8 bits", w.numel() + 2 * w.shape[0], call)

    return make


def bitsandbytes(w: Tensor, threads: int) -> Product:
    """As a layer that trains has it: dequantized for each product."""
    import bitsandbytes as bnb
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(w, quant_type="nf4", compress_statistics=False)
    size = packed.nbytes + state.absmax.nbytes
    return Product("4 bits", size, lambda x: bnb.matmul_4bit(x, packed.t(), quant_state=state))


def bitsandbytes_layer(w: Tensor, threads: int) -> Product:
    """Linear4bit in eval mode, which has a fused product on some CPUs."""
    import bitsandbytes as bnb

    told = {"compress_statistics": False, "quant_type": "nf4"}
    layer = bnb.nn.Linear4bit(w.shape[1], w.shape[0], bias=False, compute_dtype=w.dtype, **told)
    layer.weight = bnb.nn.Params4bit(w.clone(), requires_grad=False, **told)
    layer = layer.to("cpu").eval()
    return Product("4 bits", w.numel() // 2 + 4 * w.numel() // 64, layer)


def quanto(kind: str) -> Maker:
    def make(w: Tensor, threads: int) -> Product:
        from optimum import quanto as library

        model = nn.Sequential(linear_of(w))
        library.quantize(model, weights=getattr(library, kind))
        library.freeze(model)
        return Product("8 bits", w.numel() + 2 * w.shape[0], model)

    return make


def layerwise(w: Tensor, threads: int) -> Product:
    """fp8 without scales, cast to bf16 for each product."""
    from diffusers.hooks import apply_layerwise_casting

    model = nn.Sequential(linear_of(w))
    apply_layerwise_casting(model, torch.float8_e4m3fn, w.dtype, skip_modules_pattern=())
    if model[0].weight.dtype != torch.float8_e4m3fn:
        raise Unfit("the layer was not cast")
    return Product("8 bits", w.numel(), model)


def accelerate(w: Tensor, threads: int) -> Product:
    import accelerate as library

    raise Unfit(
        f"accelerate {library.__version__} has no product of its own: its hooks fetch dense "
        "weights, and what it quantizes are bitsandbytes' layers"
    )


# --- runtimes of their own ------------------------------------------------------------------------


def ctranslate2(w: Tensor, threads: int) -> Product:
    import ctranslate2 as library

    names = [n for n in dir(library) if n.lower() in ("linear", "dense", "matmul", "gemm", "ops")]
    if not names:
        raise Unfit(
            f"ctranslate2 {library.__version__} runs whole models of its file format alone: "
            "no public call multiplies by one weight"
        )
    raise Unfit(f"ctranslate2 {library.__version__} has {', '.join(names)} now: time it here")


GGML_GROUPS = {"Q8_0": "8 bits", "Q4_0": "4 bits", "Q4_K": "4 bits", "IQ4_NL": "4 bits",
               "MXFP4": "4 bits"}  # fmt: skip


def ggml(kind: str) -> Maker:
    def make(w: Tensor, threads: int) -> Product:
        from peer_ggml import Matrix

        matrix = Matrix(w, kind, threads)
        return Product(
            GGML_GROUPS[kind],
            matrix.rest_bytes,
            matrix.product,
            "int8 of fp32",  # what ggml multiplies: blocks of x with a scale each
            lambda x: x.float(),
            note=None if matrix.reordered else "in the order of the file",
        )

    return make


def openvino(kind: str) -> Maker:
    def make(w: Tensor, threads: int) -> Product:
        from peer_openvino import Compiled

        made = Compiled(w, kind, threads)
        group = "4 bits" if "4" in kind and kind != "f8e4m3" else "8 bits"
        return Product(
            group,
            made.rest_bytes,
            made.product,
            "fp32",
            lambda x: x.float().numpy(),
            torch.from_numpy,
            "widened to fp32 when it is compiled" if made.widened else None,
        )

    return make


PEERS: dict[str, dict[str, Maker]] = {
    "stowage": {storage: ours(storage) for storage in OURS},
    "torch": {
        "dense bf16": dense,
        "dense fp32": dense_fp32,
        "_weight_int8pack_mm": int8pack,
        "_weight_int4pack_mm_for_cpu, groups of 32": int4pack,
    },
    "torchao": {
        "int8 weight only, eager": torchao(False),
        "int8 weight only, compiled": torchao(True),
    },
    "bitsandbytes": {"nf4, matmul_4bit": bitsandbytes, "nf4, Linear4bit": bitsandbytes_layer},
    "optimum-quanto": {"qint8": quanto("qint8"), "qfloat8": quanto("qfloat8")},
    "diffusers": {"layerwise casting, float8_e4m3fn": layerwise},
    "accelerate": {"a product": accelerate},
    "openvino": {kind: openvino(kind) for kind in ("u8", "f8e4m3", "nf4", "i4")},
    "llama-cpp-python": {f"ggml {kind}": ggml(kind) for kind in GGML_GROUPS},
    "ctranslate2": {"a product": ctranslate2},
}


def cpu_name() -> str:
    """As /proc/cpuinfo has it, with family and model, which names alone do not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    facts = dict(line.replace("\t", "").split(":", 1) for line in lines if ":" in line)
    family, model = facts.get("cpu family", "?").strip(), facts.get("model", "?").strip()
    return f"{facts.get('model name', '?').strip()} (family {family}, model {model})"

# SPDX-License-Identifier: Apache-2.0
"""Storages that checkpoints are published in, beside others that hold the same bytes: to values,
and products with them.

One bf16 matrix in each form, all in turn in one process, medians; with one thread times are of the
processor. Values are those of the owners' own decoders (gguf's in numpy, compressed-tensors' in
torch), limits are memcpy of as many bytes. Products of few rows read weights from memory: each form
takes the next of several copies. Peers that are not installed are left out:
pip install gguf; pip install --no-deps openvino openvino-telemetry compressed-tensors loguru
Run: python bench/python/published_peers.py [--threads 1] [--json]
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from nf4_peers import Row, interleaved
from torch import Tensor
from torch.nn import functional as F

import stowage

Call = Callable[[], Any]
Product = Callable[[Tensor], Any]
GROUP = 128
ROWS = (1, 8, 32, 128, 512)


# --- to values ------------------------------------------------------------------------------------


def decoders_of_gguf(w: Tensor) -> Iterator[tuple[str, str, Call]]:
    """(storage of ours, name, call that gives fp32 values)."""
    import gguf

    for storage, kind in (("int8:block32:f16", "Q8_0"), ("int4:block32:f16", "Q4_0")):
        type_ = gguf.GGMLQuantizationType[kind]
        blocks = gguf.quants.quantize(w.float().numpy(), type_)
        yield storage, f"gguf {kind}", lambda b=blocks, t=type_: gguf.quants.dequantize(b, t)


def decoders_of_compressed_tensors(w: Tensor) -> Iterator[tuple[str, str, Call]]:
    from compressed_tensors.compressors import pack_to_int32, unpack_from_int32
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    args = QuantizationArgs(num_bits=4, group_size=GROUP, strategy="group", symmetric=True)
    groups = w.unflatten(1, (-1, GROUP)).float()
    scale = (groups.abs().amax(2, keepdim=True) / 7.5).to(w.dtype)
    codes = (groups / scale).round().clamp(-8, 7).flatten(1).to(torch.int8)
    packed, shape = pack_to_int32(codes, 4), w.shape
    yield (
        f"int4:block{GROUP}:bf16",
        "compressed-tensors",
        lambda: dequantize(unpack_from_int32(packed, 4, shape), scale.flatten(1), args=args),
    )


def to_values(w: Tensor, rounds: int) -> list[Row]:
    peers: dict[str, list[tuple[str, Call]]] = {}
    for decoders in (decoders_of_gguf, decoders_of_compressed_tensors):
        with suppress(ImportError):
            for storage, name, call in decoders(w):
                peers.setdefault(storage, []).append((name, call))
    rows = []
    for storage, others in peers.items():
        resting = stowage.quantize(w, storage)
        copy = torch.empty((resting.nbytes_at_rest + w.nbytes) // 2, dtype=torch.uint8)
        ms = interleaved(
            {"memcpy": copy.clone, storage: resting.dequantize, **dict(others)}, rounds
        )
        rows += [Row("to values", name, t, storage, ms[storage] / t) for name, t in ms.items()]
    return rows


# --- products -------------------------------------------------------------------------------------


def dense(w: Tensor) -> Product:
    return lambda x: F.linear(x, w)


def ours(w: Tensor, storage: str) -> Product:
    resting = stowage.quantize(w, storage)
    return lambda x: F.linear(x, resting)


def int4pack(w: Tensor) -> Product:
    """torch's own: fp32 or bf16 x, groups of a scale and a zero in bf16."""
    columns = w.shape[1]
    codes = torch.randint(0, 16, w.shape, dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    numbers = torch.rand(columns // GROUP, w.shape[0], 2).to(w.dtype)
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, GROUP, numbers)


def openvino(w: Tensor, threads: int) -> Product:
    """u4 codes with a zero of 8 and f16 scales, which its plugin keeps packed."""
    import numpy as np
    import openvino as ov
    from openvino import opset13 as ops

    rows, columns = w.shape
    groups = columns // GROUP
    packed = np.random.default_rng(0).integers(0, 256, (rows, columns // 2), dtype=np.uint8)
    shape = ov.Shape([rows, groups, GROUP])
    codes = ops.constant(ov.Tensor(packed, shape, ov.Type.u4))
    numbers = np.random.default_rng(1).random((rows, groups, 1), dtype=np.float32) * 0.01
    zero = ops.constant(ov.Tensor(np.full(1, 8, np.uint8), ov.Shape([1, 1, 1]), ov.Type.u4))
    value = ops.multiply(
        ops.subtract(ops.convert(codes, "f16"), ops.convert(zero, "f16")),
        ops.constant(numbers.astype(np.float16)),
    )
    flat = ops.reshape(value, np.array([rows, columns], np.int64), False)
    x = ops.parameter([-1, columns], np.float32)
    product = ops.matmul(x, ops.convert(flat, "f32"), False, True)
    options = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": "1"}
    model = ov.Model([product], [x])
    request = ov.Core().compile_model(model, "CPU", options).create_infer_request()
    return lambda x: request.infer({0: x.float().numpy()}, share_inputs=True)


def makers(w: Tensor, threads: int) -> dict[str, Callable[[], Product]]:
    storages = (f"int4:block{GROUP}:bf16", "int4:block32:f16", "mxfp4", "nvfp4", "q4_k", "int8:row")
    found: dict[str, Callable[[], Product]] = {"dense bf16": lambda: dense(w.clone())}
    found |= {s: lambda s=s: ours(w, s) for s in storages}
    found["aten int4pack"] = lambda: int4pack(w)
    found["openvino u4"] = lambda: openvino(w, threads)
    return found


class Pool:
    """So many copies of each form that the next one to be used has left the caches."""

    def __init__(self, w: Tensor, threads: int, size: int) -> None:
        copies = max(2, -(-size // (w.numel() // 2)))
        self._made: dict[str, list[Product]] = {}
        for name, make in makers(w, threads).items():
            with suppress(ImportError):
                self._made[name] = [make() for _ in range(copies)]

    def calls(self, x: Tensor) -> dict[str, Call]:
        for made in self._made.values():
            for product in made:
                product(x)  # some arrange a weight when they first see the shape of x
        turns = {name: itertools.cycle(made) for name, made in self._made.items()}
        return {name: lambda turn=turn: next(turn)(x) for name, turn in turns.items()}


@torch.inference_mode()
def products(pool: Pool, m: int, columns: int, rounds: int) -> list[Row]:
    ms = interleaved(pool.calls(torch.randn(m, columns, dtype=torch.bfloat16)), rounds)
    return [Row(f"linear M={m}", n, t, "dense bf16", ms["dense bf16"] / t) for n, t in ms.items()]


def read_row(columns: int, rows: int, rounds: int) -> Row:
    """Adding up as many bytes as the codes of the matrix in four bits have."""
    held = itertools.cycle([torch.ones(rows * columns // 8) for _ in range(8)])
    ms = interleaved({"read": lambda: next(held).sum()}, rounds)
    return Row("linear M=1", "reading the codes (torch.sum)", ms["read"], "", None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--size", type=int, default=4096, help="rows and columns of the matrix")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="of x in products")
    parser.add_argument("--pool", type=int, default=128, help="MiB of four-bit codes of each form")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    w = torch.randn(given.size, given.size).to(torch.bfloat16)
    rows = to_values(w, given.rounds)
    pool = Pool(w, given.threads, given.pool << 20)
    rows.append(read_row(given.size, given.size, given.rounds * 3))
    for m in given.rows:
        rows += products(pool, m, given.size, given.rounds * (3 if m <= 32 else 1))
    if given.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
        return
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:6.2f} of {row.beside}"
        print(f"{row.section:14s} {row.form:30s} {row.ms:10.3f} ms {ratio}")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""A matrix as ggml keeps it, and products with it by its public C functions.

The libraries are those that tools/bench_peers builds from the sources of llama-cpp-python, in a
folder `ggml` on the path of Python. Weights lie in the order that its CPU backend likes best, where
it has one (as llama.cpp loads them), and x is fp32, as ggml has it.
"""

from __future__ import annotations

import ctypes
import sys
from ctypes import c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TYPES = {"F32": 0, "Q4_0": 2, "Q8_0": 8, "Q4_K": 12, "IQ4_NL": 20, "MXFP4": 39}  # of ggml.h
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "ggml_tensor_overhead": (c_size_t, []),
    "ggml_graph_overhead": (c_size_t, []),
    "ggml_init": (c_void_p, []),  # takes a structure by value: set below
    "ggml_new_tensor_2d": (c_void_p, [c_void_p, c_int, c_int64, c_int64]),
    "ggml_mul_mat": (c_void_p, [c_void_p, c_void_p, c_void_p]),
    "ggml_new_graph": (c_void_p, [c_void_p]),
    "ggml_build_forward_expand": (None, [c_void_p, c_void_p]),
    "ggml_get_data": (c_void_p, [c_void_p]),
    "ggml_row_size": (c_size_t, [c_int, c_int64]),
    "ggml_quantize_chunk": (
        c_size_t,
        [c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p],
    ),
    "ggml_backend_cpu_init": (c_void_p, []),
    "ggml_backend_cpu_set_n_threads": (None, [c_void_p, c_int]),
    "ggml_backend_get_device": (c_void_p, [c_void_p]),
    "ggml_backend_dev_backend_reg": (c_void_p, [c_void_p]),
    "ggml_backend_dev_buffer_type": (c_void_p, [c_void_p]),
    "ggml_backend_dev_supports_op": (c_bool, [c_void_p, c_void_p]),
    "ggml_backend_reg_get_proc_address": (c_void_p, [c_void_p, c_char_p]),
    "ggml_backend_alloc_ctx_tensors_from_buft": (c_void_p, [c_void_p, c_void_p]),
    "ggml_backend_tensor_set": (None, [c_void_p, c_void_p, c_size_t, c_size_t]),
    "ggml_backend_graph_compute": (c_int, [c_void_p, c_void_p]),
}


class InitParams(ctypes.Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


@cache
def functions() -> dict[str, Any]:
    folders = [Path(p) / "ggml" for p in sys.path if (Path(p) / "ggml/libggml-cpu.so").exists()]
    if not folders:
        raise ImportError("no folder `ggml` with libggml-cpu.so on the path of Python")
    names = ("libggml-base.so", "libggml-cpu.so", "libggml.so")  # each needs those before it
    loaded = [ctypes.CDLL(str(folders[0] / name), ctypes.RTLD_GLOBAL) for name in names]
    found = {}
    for name, (result, arguments) in FUNCTIONS.items():
        function = next(getattr(library, name) for library in loaded if hasattr(library, name))
        function.restype, function.argtypes = result, arguments
        found[name] = function
    found["ggml_init"].argtypes = [InitParams]
    return found


def context() -> Any:
    """Room for a few tensors and a graph; what tensors hold is elsewhere."""
    of = functions()
    room = 16 * of["ggml_tensor_overhead"]() + 2 * of["ggml_graph_overhead"]()
    return of["ggml_init"](InitParams(room, None, True))


def preferred_types(device: Any) -> list[Any]:
    """The types of buffers in which its CPU backend puts weights in another order."""
    of = functions()
    ask = of["ggml_backend_reg_get_proc_address"](
        of["ggml_backend_dev_backend_reg"](device), b"ggml_backend_dev_get_extra_bufts"
    )
    if not ask:
        return []
    listed = ctypes.CFUNCTYPE(ctypes.POINTER(c_void_p), c_void_p)(ask)(device)
    types: list[Any] = []
    while listed and listed[len(types)]:
        types.append(listed[len(types)])
    return types


class Matrix:
    def __init__(self, w: Tensor, kind: str, threads: int) -> None:
        of = functions()
        self._rows, self._columns = w.shape
        self._backend = of["ggml_backend_cpu_init"]()
        of["ggml_backend_cpu_set_n_threads"](self._backend, threads)
        device = of["ggml_backend_get_device"](self._backend)
        self._plain = of["ggml_backend_dev_buffer_type"](device)
        self.rest_bytes = self._rows * of["ggml_row_size"](TYPES[kind], self._columns)
        values, codes = w.float().contiguous(), torch.empty(self.rest_bytes, dtype=torch.uint8)
        of["ggml_quantize_chunk"](TYPES[kind], values.data_ptr(), codes.data_ptr(), 0,
                                  self._rows, self._columns, None)  # fmt: skip
        for type_ in (*preferred_types(device), self._plain):
            self._weight = self._placed(type_, TYPES[kind], self._rows)
            self.reordered = type_ != self._plain
            self._graphs: dict[int, tuple[Any, Any, Any]] = {}
            if not self.reordered or of["ggml_backend_dev_supports_op"](device, self._graph(1)[2]):
                break
        self._graphs = {}
        of["ggml_backend_tensor_set"](self._weight, codes.data_ptr(), 0, self.rest_bytes)

    def _placed(self, buffer_type: Any, type_: int, rows: int) -> Any:
        of, ctx = functions(), context()
        tensor = of["ggml_new_tensor_2d"](ctx, type_, self._columns, rows)
        if not of["ggml_backend_alloc_ctx_tensors_from_buft"](ctx, buffer_type):
            raise MemoryError("ggml got no memory for a tensor")
        return tensor

    def _graph(self, rows: int) -> tuple[Any, Any, Any]:
        """Graph, x and y for so many rows of x."""
        of, ctx = functions(), context()
        x = of["ggml_new_tensor_2d"](ctx, TYPES["F32"], self._columns, rows)
        y = of["ggml_mul_mat"](ctx, self._weight, x)
        graph = of["ggml_new_graph"](ctx)
        of["ggml_build_forward_expand"](graph, y)
        if not of["ggml_backend_alloc_ctx_tensors_from_buft"](ctx, self._plain):
            raise MemoryError("ggml got no memory for a product")
        return graph, x, y

    def product(self, x: Tensor) -> Tensor:
        """x is copied, which takes less than a hundredth of a product; y is a view of ggml's."""
        of, rows = functions(), x.shape[0]
        graph, to, y = self._graphs.get(rows) or self._graphs.setdefault(rows, self._graph(rows))
        ctypes.memmove(of["ggml_get_data"](to), x.data_ptr(), x.nbytes)
        if of["ggml_backend_graph_compute"](self._backend, graph):
            raise RuntimeError("ggml's graph was not computed")
        size = rows * self._rows
        held = (c_float * size).from_address(of["ggml_get_data"](y))
        return torch.frombuffer(held, dtype=torch.float32).view(rows, self._rows)

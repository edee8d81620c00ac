# SPDX-License-Identifier: Apache-2.0
"""`torch.ops.bitsandbytes`: ours, as long as bitsandbytes itself is not there.

torch refuses a second definition of an op, so ours are withdrawn the moment bitsandbytes is
imported. Each is made of our own ops, which have shapes and gradients.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from stowage._ops import _torch
from stowage._ops.storage import NESTED_BLOCK
from stowage.compat.bitsandbytes import _weight, functional
from stowage.compat.bitsandbytes._peer import is_ours
from stowage.compat.bitsandbytes._state import QuantState

_PEER = "bitsandbytes"
_libraries: list[torch.library.Library] = []


def _state(
    absmax: Tensor, blocksize: int, quant_type: str, shape: Sequence[int], dtype: torch.dtype
) -> QuantState:
    return QuantState(absmax, torch.Size(shape), None, blocksize, quant_type, dtype)


def _quantize_4bit(
    A: Tensor, blocksize: int, quant_type: str, quant_storage: torch.dtype
) -> tuple[Tensor, Tensor]:
    packed, state = functional.quantize_4bit(
        A, blocksize=blocksize, quant_type=quant_type, quant_storage=quant_storage
    )
    return packed, state.absmax


def _dequantize_4bit(
    A: Tensor,
    absmax: Tensor,
    blocksize: int,
    quant_type: str,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    weight = _weight.weight_of(A, _state(absmax, blocksize, quant_type, shape, dtype))
    return _weight.dequantized(weight, dtype)


def _gemm_4bit(
    A: Tensor,
    B: Tensor,
    shapeB: Sequence[int],
    absmax: Tensor,
    blocksize: int,
    quant_type: str,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
) -> Tensor:
    state = _state(absmax, blocksize, quant_type, shapeB, A.dtype)
    if absmax_8bit is not None:
        second = QuantState(absmax, code=absmax_code, blocksize=NESTED_BLOCK)
        state.absmax, state.offset, state.state2 = absmax_8bit, absmax_offset, second
        state.nested = True
    return _weight.product(A, _weight.weight_of(B, state), bias)


def _gemv_4bit(
    A: Tensor, B: Tensor, shapeB: Sequence[int], absmax: Tensor, code: Tensor, blocksize: int
) -> Tensor:
    quant_type = "nf4" if float(code[0]) < 0 else "fp4"
    return _gemm_4bit(A, B, shapeB, absmax, blocksize, quant_type)


def _quantize_blockwise(A: Tensor, code: Tensor, blocksize: int) -> tuple[Tensor, Tensor]:
    codes, state = functional.quantize_blockwise(A, code, blocksize=blocksize)
    return codes, state.absmax


def _dequantize_blockwise(
    A: Tensor, absmax: Tensor, code: Tensor, blocksize: int, dtype: torch.dtype
) -> Tensor:
    state = QuantState(absmax, code=code, blocksize=blocksize, dtype=dtype)
    return functional.dequantize_blockwise(A, state)


# Names and arguments are those of bitsandbytes.
_OPS: dict[str, tuple[str, Callable[..., Any]]] = {
    "quantize_4bit": (
        "(Tensor A, int blocksize, str quant_type, ScalarType quant_storage) -> (Tensor, Tensor)",
        _quantize_4bit,
    ),
    "dequantize_4bit": (
        "(Tensor A, Tensor absmax, int blocksize, str quant_type, int[] shape, ScalarType dtype) "
        "-> Tensor",
        _dequantize_4bit,
    ),
    "gemm_4bit": (
        "(Tensor A, Tensor B, int[] shapeB, Tensor absmax, int blocksize, str quant_type, "
        "Tensor? bias=None, Tensor? absmax_8bit=None, Tensor? absmax_code=None, "
        "Tensor? absmax_offset=None) -> Tensor",
        _gemm_4bit,
    ),
    "gemv_4bit": (
        "(Tensor A, Tensor B, int[] shapeB, Tensor absmax, Tensor code, int blocksize) -> Tensor",
        _gemv_4bit,
    ),
    "quantize_blockwise": (
        "(Tensor A, Tensor code, int blocksize) -> (Tensor, Tensor)",
        _quantize_blockwise,
    ),
    "dequantize_blockwise": (
        "(Tensor A, Tensor absmax, Tensor code, int blocksize, ScalarType dtype) -> Tensor",
        _dequantize_blockwise,
    ),
}


_WITH_OUT = frozenset({"dequantize_4bit", "dequantize_blockwise", "gemv_4bit"})


def _into_out(function: Callable[..., Any]) -> Callable[..., None]:
    def call(*args: Any, out: Tensor) -> None:
        out.copy_(function(*args))

    return call


def register() -> None:
    """Defines each op that nobody has defined yet."""
    there = sys.modules.get(_PEER)
    if _libraries or (there is not None and not is_ours(there)):
        return
    library = torch.library.Library(_PEER, "FRAGMENT")
    for name, (schema, function) in _OPS.items():
        if not _torch.jit_get_schemas_for_operator(f"{_PEER}::{name}"):
            library.define(name + schema)
            library.impl(name, function, "CompositeImplicitAutograd")
            if name in _WITH_OUT:
                library.define(f"{name}.out{schema[: schema.index(')')]}, *, Tensor(a!) out) -> ()")
                library.impl(f"{name}.out", _into_out(function), "CompositeExplicitAutograd")
    _libraries.append(library)
    sys.meta_path.insert(0, _Finder())


def withdraw() -> None:
    """Takes our ops away again."""
    while _libraries:
        _torch.destroy(_libraries.pop())()


class _Finder:
    """Finds bitsandbytes where Python would, and withdraws our ops just before it runs."""

    def find_spec(
        self, name: str, path: Any = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _PEER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                withdraw()
                run(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

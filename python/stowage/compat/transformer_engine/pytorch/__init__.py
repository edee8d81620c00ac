# SPDX-License-Identifier: Apache-2.0
"""transformer_engine.pytorch: modules whose weights rest from the start, and their init values."""

from typing import Any, NoReturn

from stowage._ops.errors import Unsupported
from stowage.compat.transformer_engine.pytorch._init import fp8_model_init, quantized_model_init
from stowage.compat.transformer_engine.pytorch._linear import Linear

__all__ = ["Linear", "fp8_model_init", "quantized_model_init"]

_OTHERS = {
    "LayerNormLinear", "LayerNormMLP", "GroupedLinear", "TransformerLayer", "MultiheadAttention",
    "DotProductAttention", "RMSNorm", "LayerNorm",
}  # fmt: skip
_CASTS = {"autocast", "fp8_autocast"}


def __getattr__(name: str) -> NoReturn:
    if name in _OTHERS:
        raise Unsupported(
            f"stowage: {name} is fused from torch's modules in TransformerEngine; make it of "
            "those, inside stowage.training.quantized_init"
        )
    if name in _CASTS:
        raise Unsupported(
            f"stowage: {name} casts inputs to fp8; stowage.training.convert_float8 does, for "
            "layers with weights in high precision"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[Any]:
    return sorted(__all__)

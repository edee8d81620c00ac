# SPDX-License-Identifier: Apache-2.0
"""transformer_engine.common.recipe: the names of recipes, and how their weights rest here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from stowage._ops.errors import Unsupported

__all__ = [
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MXFP8BlockScaling",
    "Recipe",
]


class Format(Enum):
    """Forward and backward formats; weights are those of the forward."""

    E4M3 = "e4m3"
    E5M2 = "e5m2"
    HYBRID = "hybrid"


@dataclass(frozen=True)
class Recipe:
    """Base class, as there."""

    fp8_format: Format = Format.HYBRID


@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """Weights rest with a scale for each tensor, from their own values: no history is needed."""

    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: Any = "max"


@dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """A scale for each tensor."""


@dataclass(frozen=True)
class Float8BlockScaling(Recipe):
    """A scale for 128 values of a row."""

    fp8_format: Format = Format.E4M3


@dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """A scale for 32 values of a row; it rests in fp32, there in E8M0."""

    fp8_format: Format = Format.E4M3


_KINDS = {
    "DelayedScaling": "tensor",
    "Float8CurrentScaling": "tensor",
    "Float8BlockScaling": "block128",
    "MXFP8BlockScaling": "block32",
}


def storage_of(recipe: Any) -> str:
    """How weights rest under a recipe, ours or TransformerEngine's own; None is its default, a
    scale for each tensor. Raises Unsupported for recipes without a storage here."""
    if recipe is None:
        return "f8_e4m3:tensor"
    kind = _KINDS.get(type(recipe).__name__)
    if kind is None:
        raise Unsupported(
            f"stowage: a recipe must be one of {', '.join(_KINDS)}, got {type(recipe).__name__}; "
            "stowage.training.quantized_init takes every storage"
        )
    name = str(getattr(getattr(recipe, "fp8_format", None), "name", "HYBRID"))
    return f"f8_{'e5m2' if name == 'E5M2' else 'e4m3'}:{kind}"

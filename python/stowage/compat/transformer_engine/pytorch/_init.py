# SPDX-License-Identifier: Apache-2.0
"""quantized_model_init, and the two methods that weights made in it have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from stowage._shard.rows import StowedRows
from stowage._tensor.stowed import StowedTensor
from stowage.compat.transformer_engine.common.recipe import storage_of
from stowage.compat.transformer_engine.pytorch._linear import Linear
from stowage.training import clear_init_value, has_init_value, init_value, quantized_init
from stowage.training.init.kept import origin_of


@contextmanager
def quantized_model_init(
    enabled: bool = True,
    recipe: Any = None,
    preserve_high_precision_init_val: bool = False,
) -> Iterator[None]:
    """The weights of this package's modules made inside rest in fp8; all other modules stay plain.

    With `preserve_high_precision_init_val` their exact values are kept on the CPU, in
    `params_dtype`: `weight.get_high_precision_init_val()`. Raises Unsupported for a recipe that has
    no storage here."""
    storage = storage_of(recipe) if enabled else None
    with quantized_init(storage, preserve_init=preserve_high_precision_init_val, filter=_ours):
        yield


@contextmanager
def fp8_model_init(
    enabled: bool = True,
    recipe: Any = None,
    preserve_high_precision_init_val: bool = False,
) -> Iterator[None]:
    """The older name of quantized_model_init."""
    with quantized_model_init(enabled, recipe, preserve_high_precision_init_val):
        yield


def _ours(name: str, module: nn.Module, parameter: nn.Parameter) -> bool:
    return isinstance(module, Linear) and name == "weight"


def _get(weight: Any) -> Callable[[], Tensor | None]:
    def get_high_precision_init_val() -> Tensor | None:
        """The exact value, on the CPU; None once it has gone, or was overwritten."""
        return init_value(weight).cpu() if has_init_value(weight) else None

    return get_high_precision_init_val


def _clear(weight: Any) -> Callable[[], None]:
    def clear_high_precision_init_val() -> None:
        """Frees it."""
        clear_init_value(weight)

    return clear_high_precision_init_val


def _method(name: str, make: Callable[[Any], Any]) -> property:
    def found(weight: Any) -> Any:
        origin = origin_of(weight)
        if origin is None or not origin.terms.keeps:
            # Callers ask with hasattr() whether values were preserved.
            raise AttributeError(f"{type(weight).__name__!r} object has no attribute {name!r}")
        return make(weight)

    return property(found)


for _name, _make in (
    ("get_high_precision_init_val", _get),
    ("clear_high_precision_init_val", _clear),
):
    for _kind in (StowedTensor, StowedRows):
        setattr(_kind, _name, _method(_name, _make))

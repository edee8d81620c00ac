# SPDX-License-Identifier: Apache-2.0
"""Layerwise casting under accelerate's names: weights rest as a cast, and no hook is attached."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import nn

from stowage._ops.errors import Unsupported
from stowage.compat.accelerate._attaching import ModelHook
from stowage.compat.diffusers.hooks.layerwise_casting import apply_layerwise_casting, listed


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | Iterable[str] | None = None,
    skip_modules_classes: type[nn.Module] | Iterable[type[nn.Module]] | None = None,
    non_blocking: bool = False,
) -> None:
    """Lets the weights of the Linear and Conv layers of `module` rest as a cast to `storage_dtype`
    and compute in `compute_dtype`; see `stowage.compat.diffusers`."""
    given = skip_modules_classes
    classes = (given,) if isinstance(given, type) else tuple(given or ())
    apply_layerwise_casting(
        module,
        storage_dtype,
        compute_dtype,
        listed(skip_modules_pattern),
        (*classes, nn.Embedding),
        non_blocking,
    )


class LayerwiseCastingHook(ModelHook):
    """Cannot be attached: resting weights need no hook."""

    def __init__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise Unsupported(
            "stowage: weights must be cast by attach_layerwise_casting_hooks(module, "
            "storage_dtype, compute_dtype) or stowage.stow, which attach no hook"
        )

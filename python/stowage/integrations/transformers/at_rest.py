# SPDX-License-Identifier: Apache-2.0
"""Tensors of a file that weights at rest are made of, as a conversion of transformers: it has made
them already."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import (
    ConversionOps,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

_PATTERN = "at rest"  # no name has a space


class _Made(ConversionOps):  # type: ignore[misc]  # transformers is untyped
    """Stands for what the reader has done: a converter must have an operation."""

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **_: Any,
    ) -> dict[str, Any]:
        return input_dict


class AtRest(WeightConverter):  # type: ignore[misc]  # transformers is untyped
    """Leads tensors of a file to the weights of the model that rest already. These are made when
    the first name is asked for: then all places are known.

    Args:
        fill: fills the model; the name of a weight by that of each of its tensors in the file.
        conversions: of the model, whose renamings come before all converters.
        device_of: where a parameter belongs.
    """

    __slots__ = ("_conversions", "_device_of", "_fill", "_weights")

    def __init__(
        self,
        fill: Callable[[], Mapping[str, str]],
        conversions: Sequence[Any],
        device_of: Callable[[str], torch.device],
    ) -> None:
        super().__init__([_PATTERN], [_PATTERN], [_Made()])
        self._fill, self._conversions, self._device_of = fill, conversions, device_of
        self._weights: dict[str, str] | None = None

    def __deepcopy__(self, memo: Any) -> AtRest:
        made = AtRest(self._fill, self._conversions, self._device_of)  # one for each weight
        made._weights = self._weights
        return made

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        if self._weights is None:
            renamings = [each for each in self._conversions if isinstance(each, WeightRenaming)]
            self._weights = {
                rename_source_key(member, renamings, [])[0]: name
                for member, name in self._fill().items()
            }
        name = self._weights.get(source_key)
        return (source_key, None) if name is None else (name, _PATTERN)

    def convert(
        self, layer_name: str, model: Any = None, config: Any = None, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        self.collected_tensors.clear()  # unread
        weight, device = model.get_parameter_or_buffer(layer_name), self._device_of(layer_name)
        if weight.device != device:
            weight = nn.Parameter(weight.detach().to(device), requires_grad=False)
        return {layer_name: weight}


def renaming(model: Any, conversions: Sequence[Any]) -> Callable[[str], str]:
    """The model's names for weights of a file, as transformers would find them; experts of which
    the model has a stack keep theirs, under the model's prefix."""
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    known, prefix = set(model.state_dict()), model.base_model_prefix

    def renamed(name: str) -> str:
        for one in (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}"):
            new, pattern = rename_source_key(one, renamings, converters)
            if new in known:
                return one if pattern is not None else new
        return name

    return renamed

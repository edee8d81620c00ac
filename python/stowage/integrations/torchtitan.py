# SPDX-License-Identifier: Apache-2.0
"""torchtitan: `model_registry(..., converters=[Float8Converter.Config(recipe="rowwise")])`."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from torch import nn
from torchtitan.protocols.model import ModelConfigConverter  # type: ignore[import-not-found]

from stowage.training import convert_float8

__all__ = ["Float8Converter"]


class Float8Converter(ModelConfigConverter):  # type: ignore[misc]  # torchtitan is untyped
    """Lets the model that a configuration builds train its linear layers in fp8.

    torchtitan's converters change configurations, before anything is built. This one changes what
    the whole model's builds: the same model, after `stowage.training.convert_float8`, on the meta
    device too. Modules stay torchtitan's own. Before or after its LoRAConverter,
    `skip=["*.lora_*"]` leaves the adapters plain, beside a frozen base that multiplies in fp8.

    Args:
        config: the recipe, and globs of names of modules that are skipped.

    Example:
        >>> from stowage.integrations.torchtitan import Float8Converter
        >>> converters = [Float8Converter.Config(recipe="rowwise", skip=["lm_head"])]
        >>> spec = model_registry("8B", converters=converters)  # doctest: +SKIP
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):  # type: ignore[misc]
        """What is said of a conversion."""

        recipe: str = "tensorwise"
        """A name of `stowage.training.RECIPES`."""

        skip: list[str] = field(default_factory=list)
        """Globs of names of modules that stay as they are."""

        gather: Literal["fp8", "high"] | None = None
        """What FSDP2 sends, as in `convert_float8`."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """Gives the configuration of a model that trains in fp8.

        Args:
            model_config: of the whole model.

        Returns:
            The same, of a class whose `build` converts what it has built.
        """
        kind, said = type(model_config), self.config

        def is_taken(name: str, module: nn.Module) -> bool:
            return not any(fnmatch.fnmatchcase(name, glob) for glob in said.skip)

        def build(self: Any, **given: Any) -> nn.Module:
            model = kind.build(self, **given)
            return convert_float8(model, said.recipe, filter=is_taken, gather=said.gather)

        converted = type(f"Float8{kind.__name__}", (kind,), {"build": build})
        return converted(**{f.name: getattr(model_config, f.name) for f in fields(kind) if f.init})

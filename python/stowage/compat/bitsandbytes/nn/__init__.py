# SPDX-License-Identifier: Apache-2.0
"""`bitsandbytes.nn`, as far as it concerns 4-bit weights."""

from __future__ import annotations

from typing import Any

from stowage.compat.bitsandbytes._peer import forwarded
from stowage.compat.bitsandbytes.nn import modules, parametrize
from stowage.compat.bitsandbytes.nn._params import Params4bit
from stowage.compat.bitsandbytes.nn.modules import (
    Embedding4bit,
    EmbeddingFP4,
    EmbeddingNF4,
    Linear4bit,
    LinearFP4,
    LinearNF4,
)

__all__ = [
    "Embedding4bit",
    "EmbeddingFP4",
    "EmbeddingNF4",
    "Linear4bit",
    "LinearFP4",
    "LinearNF4",
    "Params4bit",
    "modules",
    "parametrize",
]


def __getattr__(name: str) -> Any:
    return forwarded("bitsandbytes.nn", modules.PEERS, name)

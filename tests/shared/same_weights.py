# SPDX-License-Identifier: Apache-2.0
"""Whether two models have the same weights, at rest or plain."""

from __future__ import annotations

from typing import Any

import torch

import stowage


def parts(model: Any) -> dict[str, list[torch.Tensor]]:
    return {
        name: [*weight.parts.values()] if isinstance(weight, stowage.StowedTensor) else [weight]
        for name, weight in model.named_parameters()
    }


def same(one: Any, other: Any) -> bool:
    mine, theirs = parts(one), parts(other)
    return mine.keys() == theirs.keys() and all(
        len(mine[name]) == len(theirs[name]) and all(map(torch.equal, mine[name], theirs[name]))
        for name in mine
    )

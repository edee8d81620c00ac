# SPDX-License-Identifier: Apache-2.0
"""What torch's gathers cannot do with fp8 weights, found before one of them runs."""

from torch import nn

from stowage._ops.errors import raise_problems
from stowage._shard.resharding import reshard_problems


def check(model: nn.Module) -> None:
    """Raises InvalidArgument that names the modules whose sharding cannot work; the first gather
    does so too, on every rank."""
    raise_problems("stowage", reshard_problems(model))

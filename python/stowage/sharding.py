# SPDX-License-Identifier: Apache-2.0
"""Models whose resting weights are spread over processes: checks and checkpoints."""

from stowage._model.files.sharded import check, save, state_dict
from stowage._shard.preparation import prepare
from stowage._shard.rows import StowedRows
from stowage._tiers.spread_load import load

__all__ = [
    "StowedRows",
    "check",
    "load",
    "prepare",
    "save",
    "state_dict",
]

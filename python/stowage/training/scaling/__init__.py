# SPDX-License-Identifier: Apache-2.0
"""What sharded training costs at any number of ranks: bytes on the wire, collectives, memory.

Closed formulas, docs/scaling.md; `python -m stowage.training.scaling` prints them for decoders.
"""

from stowage.training.scaling.decoders import decoder, elements, width_of
from stowage.training.scaling.groups import PLAIN, Group, Setting, Weight
from stowage.training.scaling.steps import Memory, Wire, memory, wire

__all__ = [
    "PLAIN",
    "Group",
    "Memory",
    "Setting",
    "Weight",
    "Wire",
    "decoder",
    "elements",
    "memory",
    "width_of",
    "wire",
]

# SPDX-License-Identifier: Apache-2.0
"""Which weights of a model rest, and how: rules and what they decide."""

from stowage._model.choice.policy import Policy
from stowage._model.choice.selection import Rules, Wish
from stowage._model.weights import Choice

__all__ = [
    "Choice",
    "Policy",
    "Rules",
    "Wish",
]

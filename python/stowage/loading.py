# SPDX-License-Identifier: Apache-2.0
"""Loading models whose weights rest, or come to rest."""

from stowage._tiers.load import load, load_state_dict

__all__ = [
    "load",
    "load_state_dict",
]

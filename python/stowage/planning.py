# SPDX-License-Identifier: Apache-2.0
"""Which weight rests where, and what a pass will take."""

from stowage._tiers.plans.plan import (
    Comparison,
    Plan,
    Predicted,
    Unit,
    machine_key,
    measured_links,
    plan,
)

__all__ = [
    "Comparison",
    "Plan",
    "Predicted",
    "Unit",
    "machine_key",
    "measured_links",
    "plan",
]

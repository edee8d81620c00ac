# SPDX-License-Identifier: Apache-2.0
"""Names that pickles of earlier releases have."""

from stowage._tiers.plans.execution import (
    _Begin,  # noqa: F401  pickles name it
    _End,  # noqa: F401  pickles name it
)

# SPDX-License-Identifier: Apache-2.0
"""StowedView: a view of a weight that rests."""

from stowage._tensor.views import StowedView

__all__ = [
    "StowedView",
]

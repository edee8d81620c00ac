# SPDX-License-Identifier: Apache-2.0
"""StowedTensor: a weight that rests small and computes exactly."""

from stowage._tensor.stowed import (
    StowedTensor,
    _rebuild,  # noqa: F401  pickles name it
)

__all__ = [
    "StowedTensor",
]

# SPDX-License-Identifier: Apache-2.0
"""Names that pickles of earlier releases have."""

from stowage._tensor.products.blocks import (
    _close,  # noqa: F401  pickles name it
    _open,  # noqa: F401  pickles name it
)

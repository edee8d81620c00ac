# SPDX-License-Identifier: Apache-2.0
"""Names that pickles of earlier releases have."""

from stowage._tensor.trails import rebuild  # noqa: F401  pickles name it

# SPDX-License-Identifier: Apache-2.0
"""Names that pickles of earlier releases have."""

from stowage._tiers.disk.engine import _Signature  # noqa: F401  pickles name it

# SPDX-License-Identifier: Apache-2.0
"""Names that pickles of earlier releases have."""

from stowage.training.init.origin import Home  # noqa: F401  pickles name it

# SPDX-License-Identifier: Apache-2.0
"""Names that pickles of earlier releases have."""

from stowage._model.reports.table import (
    Report,  # noqa: F401  pickles name it
    Row,  # noqa: F401  pickles name it
)

# SPDX-License-Identifier: Apache-2.0
"""Names that pickles of earlier releases have."""

from stowage._model.reports.report import _Memory  # noqa: F401  pickles name it

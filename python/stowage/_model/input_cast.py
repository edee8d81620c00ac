# SPDX-License-Identifier: Apache-2.0
"""Names that pickles of earlier releases have."""

from stowage._model.rest.granularity import (
    _note_and_cast,  # noqa: F401  pickles name it
    _restore,  # noqa: F401  pickles name it
    _to_compute,  # noqa: F401  pickles name it
)

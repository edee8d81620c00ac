# SPDX-License-Identifier: Apache-2.0
"""Names that pickles of earlier releases have."""

from stowage._model.rest.formation import Loss  # noqa: F401  pickles name it

# SPDX-License-Identifier: Apache-2.0
"""Saving models with resting weights."""

from stowage._model.files.save import save, state_dict

__all__ = [
    "save",
    "state_dict",
]

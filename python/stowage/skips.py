# SPDX-License-Identifier: Apache-2.0
"""What `skip=` of `stow` and `load` takes, and the named lists."""

from stowage._model.choice.skips import AUTO, DIFFUSION, HEADS, LANGUAGE, NAMED, Skip, Skips

__all__ = [
    "AUTO",
    "DIFFUSION",
    "HEADS",
    "LANGUAGE",
    "NAMED",
    "Skip",
    "Skips",
]

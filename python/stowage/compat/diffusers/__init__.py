# SPDX-License-Identifier: Apache-2.0
"""Layerwise casting as diffusers 0.42 names it. Importing this does not import diffusers; only
`patched` needs it, so plain modules are served without. `hooks` mirrors `diffusers.hooks`."""

from stowage.compat.diffusers._models import (
    disable_layerwise_casting,
    enable_layerwise_casting,
    get_memory_footprint,
    patched,
)

__all__ = [
    "disable_layerwise_casting",
    "enable_layerwise_casting",
    "get_memory_footprint",
    "patched",
]

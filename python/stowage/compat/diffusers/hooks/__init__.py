# SPDX-License-Identifier: Apache-2.0
"""`diffusers.hooks`, as far as it concerns layerwise casting."""

from stowage.compat.diffusers.hooks.layerwise_casting import (
    apply_layerwise_casting,
    apply_layerwise_casting_hook,
)

__all__ = ["apply_layerwise_casting", "apply_layerwise_casting_hook"]

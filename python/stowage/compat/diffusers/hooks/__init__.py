# SPDX-License-Identifier: Apache-2.0
"""`diffusers.hooks`, as far as it concerns layerwise casting and group offloading."""

from stowage.compat.diffusers.hooks.group_offloading import apply_group_offloading
from stowage.compat.diffusers.hooks.layerwise_casting import (
    apply_layerwise_casting,
    apply_layerwise_casting_hook,
)

__all__ = ["apply_group_offloading", "apply_layerwise_casting", "apply_layerwise_casting_hook"]

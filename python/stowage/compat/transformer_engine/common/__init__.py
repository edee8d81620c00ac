# SPDX-License-Identifier: Apache-2.0
"""transformer_engine.common: recipes."""

from stowage.compat.transformer_engine.common import recipe

__all__ = ["recipe"]

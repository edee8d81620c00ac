# SPDX-License-Identifier: Apache-2.0
"""transformers: `from_pretrained(..., quantization_config=StowageConfig("nf4"))`. An import
registers the quantizer; nothing of transformers is patched."""

from stowage.integrations.transformers.config import StowageConfig
from stowage.integrations.transformers.quantizer import StowageQuantizer

__all__ = [
    "StowageConfig",
    "StowageQuantizer",
]

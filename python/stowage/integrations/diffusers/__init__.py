# SPDX-License-Identifier: Apache-2.0
"""diffusers: models and pipelines with `StowageConfig`. diffusers has no function to register a
quantizer, so an import enters it in the two tables of `diffusers.quantizers.auto`."""

from diffusers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

from stowage.integrations.diffusers.model_quantizer import DiffusersQuantizer
from stowage.integrations.transformers.config import METHOD, StowageConfig

AUTO_QUANTIZER_MAPPING[METHOD] = DiffusersQuantizer
AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = StowageConfig

__all__ = [
    "DiffusersQuantizer",
    "StowageConfig",
]

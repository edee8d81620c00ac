# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's quantized init and high-precision init values, over Stowage. Importing this
does not import transformer_engine; it gives weights made in `quantized_model_init` two methods."""

from stowage.compat.transformer_engine import common, pytorch

__all__ = ["common", "pytorch"]

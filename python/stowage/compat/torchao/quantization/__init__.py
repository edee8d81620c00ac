# SPDX-License-Identifier: Apache-2.0
"""`torchao.quantization`, as far as it concerns NF4."""

# The package first: importing it later would put it in the place of the function of its name.
import stowage.compat.torchao.quantization.quantize_.workflows.nf4.nf4_tensor  # noqa: F401
from stowage.compat.torchao._nf4 import NF4Tensor, quantize_, to_nf4

__all__ = ["NF4Tensor", "quantize_", "to_nf4"]

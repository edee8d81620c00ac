# SPDX-License-Identifier: Apache-2.0
"""The NF4 weights of torchao 0.18 (and of torchtune) and its fp8 training, over Stowage. Importing
this does not import torchao; it gives stowed weights the attribute names of its NF4Tensor."""

from stowage.compat.torchao import dtypes, float8, prototype, quantization
from stowage.compat.torchao._nf4 import FrozenNF4Linear, quantize_

__all__ = ["FrozenNF4Linear", "dtypes", "float8", "prototype", "quantization", "quantize_"]

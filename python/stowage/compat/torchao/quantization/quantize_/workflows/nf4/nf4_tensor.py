# SPDX-License-Identifier: Apache-2.0
"""`torchao.quantization.quantize_.workflows.nf4.nf4_tensor`."""

from stowage.compat.torchao._nf4 import (
    _INNER_TENSOR_NAMES_FOR_SHARDING,
    NF4Tensor,
    linear_nf4,
    to_nf4,
)

__all__ = ["_INNER_TENSOR_NAMES_FOR_SHARDING", "NF4Tensor", "linear_nf4", "to_nf4"]

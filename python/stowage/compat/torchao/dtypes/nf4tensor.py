# SPDX-License-Identifier: Apache-2.0
"""`torchao.dtypes.nf4tensor`: the import path before torchao 0.18."""

from stowage.compat.torchao._nf4 import (
    _INNER_TENSOR_NAMES_FOR_SHARDING,
    NF4Tensor,
    linear_nf4,
    nf4_weight_only,
    to_nf4,
)

__all__ = [
    "_INNER_TENSOR_NAMES_FOR_SHARDING",
    "NF4Tensor",
    "linear_nf4",
    "nf4_weight_only",
    "to_nf4",
]

# SPDX-License-Identifier: Apache-2.0
"""`torchao.prototype._nf4tensor_api`."""

from stowage.compat.torchao._nf4 import NF4Tensor, NF4WeightOnlyConfig, nf4_weight_only

__all__ = ["NF4Tensor", "NF4WeightOnlyConfig", "nf4_weight_only"]

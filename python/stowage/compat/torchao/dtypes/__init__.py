# SPDX-License-Identifier: Apache-2.0
"""`torchao.dtypes`: the import path before torchao 0.18."""

from stowage.compat.torchao._nf4 import NF4Tensor, to_nf4

__all__ = ["NF4Tensor", "to_nf4"]

# SPDX-License-Identifier: Apache-2.0
"""`torchao.prototype`, as far as it concerns NF4."""

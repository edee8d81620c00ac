# SPDX-License-Identifier: Apache-2.0
"""`torchao.quantization.quantize_.workflows`, as far as it concerns NF4."""

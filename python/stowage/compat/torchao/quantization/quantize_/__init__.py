# SPDX-License-Identifier: Apache-2.0
"""The package `torchao.quantization.quantize_`, which has the name of a function beside it."""

# SPDX-License-Identifier: Apache-2.0
"""`torchao.quantization.quantize_.workflows.nf4`."""

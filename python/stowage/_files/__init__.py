# SPDX-License-Identifier: Apache-2.0
"""Tensors in files: where bytes come from, and the names that files use."""

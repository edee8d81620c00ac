# SPDX-License-Identifier: Apache-2.0
"""The weight as a tensor: views, writes, products, gradients."""

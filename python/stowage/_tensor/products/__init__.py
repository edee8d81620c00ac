# SPDX-License-Identifier: Apache-2.0
"""How products with resting weights are computed: directly, by tiles, in blocks."""

# SPDX-License-Identifier: Apache-2.0
"""Models that rest from the start, and the exact values that they began with."""

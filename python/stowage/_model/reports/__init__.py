# SPDX-License-Identifier: Apache-2.0
"""What rests where, in what form, and how far it is from the exact values."""

# SPDX-License-Identifier: Apache-2.0
"""A whole model: which weights rest and why, how they are made, kept, reported and given back."""

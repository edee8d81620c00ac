# SPDX-License-Identifier: Apache-2.0
"""A whole model: which weights rest, how they are made, kept, reported, filled and saved."""

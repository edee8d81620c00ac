# SPDX-License-Identifier: Apache-2.0
"""Paths that pickles of earlier releases name."""

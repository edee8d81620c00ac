# SPDX-License-Identifier: Apache-2.0
"""Weights that rest in a file and are fetched into memory, within a budget, when used."""

# SPDX-License-Identifier: Apache-2.0
"""Weights that rest on the CPU and are fetched to a device when they are used."""

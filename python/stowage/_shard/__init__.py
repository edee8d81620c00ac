# SPDX-License-Identifier: Apache-2.0
"""Rows of a weight in other processes: records, their operators, their collectives."""

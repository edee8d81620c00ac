# SPDX-License-Identifier: Apache-2.0
"""Resting weights spread over processes: row records, their tensor, what FSDP2 and DTensor ask."""

# SPDX-License-Identifier: Apache-2.0
"""What is known before anything is loaded, what it asks, and what passes took."""

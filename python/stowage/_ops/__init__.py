# SPDX-License-Identifier: Apache-2.0
"""The operators on codes and scales: the compiled library, their shapes and errors, and the
same numbers in stock torch."""

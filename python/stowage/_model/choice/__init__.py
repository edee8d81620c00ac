# SPDX-License-Identifier: Apache-2.0
"""Which weights rest, and as what: by names and rules, or by measured errors."""

# SPDX-License-Identifier: Apache-2.0
"""How one weight comes to rest, what is kept beside it, and how it works."""

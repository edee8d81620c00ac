# SPDX-License-Identifier: Apache-2.0
"""Where weights wait: disk, device, device maps, plans."""

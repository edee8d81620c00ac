# SPDX-License-Identifier: Apache-2.0
"""Device maps: which module is on which device, by names, from sizes and limits."""
